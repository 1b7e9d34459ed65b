"""Where the time and the memory go: throughput and MFU, a trace of a training run, a benchmark of its step.

`Meter` times optimizer work alone; `Profiler` wraps torch.profiler and ends with a summary. train.py uses both.
This file bears the name of a standard-library module that `cProfile`, and through it torch.compile and DCP, import
by that name. So it hands every name it does not define on to the standard library's own module.

    python train.py --profile                     # a trace and a summary of three steps, in OUT/profile
    python profile.py --model gpt2 --seq_len 512  # one step: compiled or not x dtype x loss x activation checkpoint
    python profile.py plot out/a out/b            # loss, learning rate, gradient norm, speed
"""
# torch is imported inside the functions: `python -m cProfile` should not wait for it.
import collections
import contextlib
import gzip
import importlib.util
import itertools
import json
import os
import re
import sys
import tempfile
import timeit
from dataclasses import dataclass, replace
from typing import Annotated

SPEC = importlib.util.spec_from_file_location("_profile", os.path.join(os.path.dirname(os.__file__), "profile.py"))
STANDARD = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(STANDARD)


def __getattr__(name):
    """A name this module does not define: the standard library's."""
    return getattr(STANDARD, name)


# Dense TFLOP/s in 16 bits with sums in fp32, from the vendors' data sheets (sparse figures are twice that), by words of
# the device's name. The first match counts, so more words stand before fewer; a slice of a GPU (MIG) is measured.
PEAK_TFLOPS = {"MIG": None, "GB200": 2500, "B200": 2250, "GH200": 989, "H200 NVL": 835, "H200": 989, "H100 PCIe": 756,
               "H100 NVL": 835, "H100": 989, "A100": 312, "MI300X": 1307, "L40S": 362, "L40": 181, "L4": 121}


def data_sheet(gpu):
    """Dense 16-bit TFLOP/s of what torch.cuda.get_device_properties says, None if unknown.

    GeForce RTX 20 to 50: 512 operations a cycle and multiprocessor at the card's boost clock, as NVIDIA's white papers
    have 71 for RTX 3090, 165 for 4090 and 210 for 5090 (their larger figures sum in fp16, which nothing here does).
    """
    if "GeForce RTX" in gpu.name:
        return 512 * gpu.multi_processor_count * gpu.clock_rate / 1e9  # clock_rate is in kHz
    words = set(gpu.name.replace("-", " ").split())
    return next((peak for part, peak in PEAK_TFLOPS.items() if words >= set(part.split())), None)


def peak_flops(device, dtype, tflops=None):
    """(FLOP/s, where the figure is from): `tflops` as given, a known GPU's data sheet in 16 bits, or measured here."""
    import torch
    if tflops:
        return tflops * 1e12, "--peak_tflops"
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        gpu = torch.cuda.get_device_properties(device)
        if known := data_sheet(gpu):
            return known * 1e12, f"{gpu.name}'s dense peak"
    size = 1024 if device.type == "cpu" else 8192
    slow = device.type == "cpu" and dtype == torch.float16  # its products alone are slower than within a model
    a, b = (torch.randn(size, size, device=device).to(torch.float32 if slow else dtype) for _ in range(2))
    # The first call chooses and loads the kernel; .item() waits for the device.
    # The fastest of several, for other programs may be busy: a peak that is too low makes MFU too high.
    seconds = min(timeit.repeat(lambda: (a @ b)[0, 0].item(), number=1, repeat=8))
    return 2 * size ** 3 / seconds, f"measured here on {size} x {size} matrices"


def synchronize(device):
    """Wait until an accelerator has done what was asked of it; a CPU has already."""
    import torch
    torch.get_device_module(device).synchronize()


def peak_memory(device):
    """Most memory used so far in GB: the allocator's on CUDA, the process's resident set elsewhere, None if unknown."""
    import torch
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    with contextlib.suppress(ImportError):  # Windows has none
        import resource
        # macOS counts bytes, Linux kilobytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


class Meter:
    """Throughput: `start()` when optimizer work begins, `read(tokens)` when some of it is done.

    `flops_per_token` and `peak` (FLOP/s of all devices together) turn tokens per second into MFU.
    """

    def __init__(self, flops_per_token, peak, device):
        self.flops_per_token, self.peak, self.device = flops_per_token, peak, device
        self.start()

    def start(self):
        """Begin anew after a reading; what passed since then (an evaluation, a save) does not count."""
        synchronize(self.device)
        self.since, self.waited = timeit.default_timer(), 0.0

    def wait(self, iterator):
        """The iterator's next item; the time it took counts as waiting for data."""
        start = timeit.default_timer()
        item = next(iterator)
        self.waited += timeit.default_timer() - start
        return item

    def read(self, tokens):
        """Metrics of the `tokens` (of all processes) worked on since the last start, as metrics.jsonl names them."""
        synchronize(self.device)
        rate = tokens / (timeit.default_timer() - self.since)
        return dict(tokens_per_s=rate, mfu=rate * self.flops_per_token / self.peak,
                    peak_mem_gb=peak_memory(self.device), data_wait_s=self.waited)


# ---- python train.py --profile ----

REGIONS = "data", "forward", "backward", "optimizer", "checkpoint"
# Steps: until compilation and caches have settled; traced, but dropped, for tracing itself starts slowly; kept.
SCHEDULE = dict(wait=5, warmup=2, active=3)


def tracer(schedule=None, ready=None, detail=False):
    """A torch.profiler.profile of the CPU, and of CUDA where it is."""
    import torch
    if detail:  # torch 2.13's stacks point into code: keep that of modules which, say, a traced save imports
        kept = []
        sys.addaudithook(lambda event, args: kept.extend(args) if event == "exec" else None)
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # or it writes its own progress among the run's lines
    # Without acc_events torch 2.11 warns that a cycle clears the events of the one before; here there is one.
    return torch.profiler.profile(schedule=schedule and torch.profiler.schedule(**schedule), on_trace_ready=ready,
                                  record_shapes=detail, with_stack=detail, profile_memory=detail, acc_events=True)


def shrink(file, limit):
    """Leave out the shortest events of a trace, half at a time, until its file has at most `limit` bytes."""
    while file.stat().st_size > limit:
        trace = json.loads(gzip.decompress(file.read_bytes()))
        events = sorted(trace["traceEvents"], key=lambda event: (event["ph"] != "M", -event.get("dur", 0)))  # M: names
        trace["traceEvents"] = events[:len(events) // 2]
        file.write_bytes(gzip.compress(json.dumps(trace).encode()))


def want_of_memory(error):
    """What to do about an exception that is for want of memory, in one line; "" for any other."""
    if not re.search("out of memory|can't allocate memory", str(error)):
        return ""
    line = str(error).splitlines()[0].rstrip(".")
    return f"{line}: take a smaller --micro_batch or model, --activation_checkpoint block, or processes with --fsdp"


class Profiler:
    """torch.profiler over a few steps of a run, see SCHEDULE; without a `folder` the same calls do nothing.

    Use it as the context of the training loop, call `step()` at the end of each turn, and name what a step does by
    `region(name)`. Process N writes trace_rankN.json.gz (for ui.perfetto.dev) and on CUDA, when the run ends, also
    when it ends for want of memory, memory_rankN.pickle (for pytorch.org/memory_viz); rank 0 writes operators.txt and
    summary.txt. With `detail` all know shapes, Python stacks and memory: a trace twice as large, so of a single step.
    """

    def __init__(self, folder, device, rank=0, say=print, detail=False):
        self.folder, self.device, self.rank, self.say, self.detail, self.trace = folder, device, rank, say, detail, None
        if folder:
            folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self):
        if self.folder:
            import torch
            schedule = dict(SCHEDULE, warmup=4, active=1) if self.detail else SCHEDULE
            self.trace = tracer(schedule, self.finish, self.detail)  # the schedule starts it
            if self.device.type == "cuda":
                torch.cuda.memory._record_memory_history(stacks="python", max_entries=100_000)

    def __exit__(self, kind, error, traceback):
        if self.folder and self.device.type == "cuda":
            import torch
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory_rank{self.rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        if advice := want_of_memory(error):
            file = f"; with --profile, memory_rank{self.rank}.pickle shows what fills it" * (self.device.type == "cuda")
            sys.exit(advice + file)  # this ends all
        if self.trace:
            self.trace.on_trace_ready = None  # what it has may be half a step
            self.trace.stop()
            self.say(f"no profile: it takes {sum(SCHEDULE.values())} steps, the run had {self.trace.step_num}")

    def step(self):
        """One turn of the training loop is over; after the last of the schedule come the files and the summary."""
        if self.trace:
            self.trace.step()

    def region(self, name):
        """Context: what runs inside is the part `name` of the step, one of REGIONS."""
        return self.record(name) if self.trace else contextlib.nullcontext()

    @contextlib.contextmanager
    def record(self, name):
        """A region of the trace. It ends when the GPU is done with it, or its time would be found in a later one."""
        from torch.profiler import record_function
        with record_function(name):
            yield
            synchronize(self.device)

    def finish(self, trace):
        """Write what torch.profiler has recorded; rank 0 also a table of operators and the summary, which it prints."""
        self.trace, file = None, self.folder / f"trace_rank{self.rank}.json.gz"
        try:
            trace.export_chrome_trace(str(file))
            shrink(file, 50e6)
            if self.rank == 0:
                order = f"self_{'device' if self.device.type == 'cuda' else 'cpu'}_time_total"
                table = trace.key_averages(group_by_input_shape=self.detail).table(order, row_limit=100)
                (self.folder / "operators.txt").write_text(table)
                lines = [*summarize(trace.events()), *memory(self.device), *compilations()]
                (self.folder / "summary.txt").write_text("\n".join(lines) + "\n")
                self.say(f"---- {self.folder} ----", *lines, "----", sep="\n")
        except OSError as error:  # a full disk costs this alone
            self.say(f"no profile: {error}")


def covered(events):
    """Microseconds in which at least one of the events was running."""
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    ends = itertools.accumulate((end for _, end in spans), max, initial=0.0)  # of all spans before
    return sum(max(0.0, end - max(start, until)) for (start, end), until in zip(spans, ends))


def parts(events):
    """torch.profiler's events: the CPU's, the GPU's, those that communicate, and those that work.

    Work is kernels on a GPU; on a CPU, operators that no other operator called, and compiled graphs.
    """
    # Annotations span kernels, and would count their time twice.
    host = [event for event in events if event.device_type.name == "CPU"]
    device = [event for event in events if event.device_type.name != "CPU" and not event.is_user_annotation]
    talk = [event for event in device or host if event.name.startswith(("nccl", "gloo:"))]
    return host, device, talk, [event for event in device if not event.name.startswith("nccl")] or [
        event for event in host if "Compiled" in event.name or event.name.startswith("aten::")
        and not (event.cpu_parent and event.cpu_parent.name.startswith("aten::"))]


def summarize(events):
    """Lines on where the traced steps' time went; all shares are of the steps' time.

    Communication is hidden while work is running.
    """
    host, device, talk, work = parts(events)
    steps = [event for event in host if event.name.startswith("ProfilerStep")]
    duration = covered(steps)
    shares = {name: covered(event for event in host if event.name == name) / duration for name in REGIONS}
    working, busy = covered(work) / duration, covered(work + talk) / duration
    idle, exposed = 1 - busy, busy - working
    spent = collections.Counter()
    for event in device or host:
        spent[event.name] += event.time_range.elapsed_us() if device else event.self_cpu_time_total
    # In this order: what waits for data or messages is idle, too.
    diagnosis = next(text for share, text in (
        (shares["data"], "data-bound: put --data on a faster disk"),
        (exposed, "communication-bound: take a larger --batch_size, and neither --fsdp nor --tp if it fits without"),
        (idle - shares["checkpoint"], "small kernels: take --compile on or a larger --micro_batch"),
        (1, "compute-bound: --dtype bf16 where it is fast, --compile on, then more processes")) if share > 0.2)
    return [
        f"{len(steps)} steps of {duration / len(steps) / 1e3:,.1f} ms: "
        + ", ".join(f"{name} {time:.1%}" for name, time in shares.items()) + f", other {1 - sum(shares.values()):.1%}",
        f"{'GPU' if device else 'CPU'} idle {idle:.1%}, waiting for data {shares['data']:.1%}, communication hidden "
        f"{covered(talk) / duration - exposed:.1%}, not hidden {exposed:.1%}",
        *(f"{time / duration:6.1%}  {name[:100]}" for name, time in spent.most_common(10)), f"diagnosis: {diagnosis}"]


def memory(device):
    """Line on the CUDA allocator: what it holds beyond what was ever in use at once is lost to fragmentation."""
    if device.type == "cuda":
        import torch
        stats = torch.cuda.memory_stats(device)
        used, held = (stats[f"{kind}_bytes.all.peak"] / 1e9 for kind in ("allocated", "reserved"))
        yield f"peak memory {used:.2f} GB allocated, {held:.2f} GB reserved, fragmentation {1 - used / held:.1%}"


def compilations():
    """Lines on what torch.compile could not take into one graph, or compiled again, and where."""
    from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons
    lines = [f"graph break in {found.user_stack[-1]}: {found.reason}" for found in graph_break_reasons]
    lines += [f"recompiled {found.co_name} ({found.co_filename}:{found.co_firstlineno}): {found.recompile_reason}"
              for found in get_compilation_metrics() if found.recompile_reason]
    return list(dict.fromkeys(line.splitlines()[0] for line in lines))


# ---- python profile.py ----

CURVES = "loss", "val_loss", "lr", "grad_norm", "tokens_per_s"


def read_curves(folders):
    """{folder: {name of CURVES: [(step, value), ...]}} from the metrics.jsonl of runs."""
    runs = {}
    for run in folders:
        # A power cut may leave torn lines, or rubbish.
        with open(os.path.join(run, "metrics.jsonl"), encoding="utf-8", errors="replace") as file:
            rows = [json.loads(line) for line in file if re.fullmatch(r'{"step": \d+,[^{}]*}\n', line)]
        if not rows:
            raise ValueError(f"{file.name} has no numbers yet")
        runs[run] = {name: [(row["step"], row[name]) for row in rows if row.get(name) is not None] for name in CURVES}
    return runs


def plot(runs):
    """Draw the curves of runs: FOLDER/metrics.png in the first one's by matplotlib, without it in the terminal."""
    try:
        from matplotlib import pyplot
    except ImportError:
        pictures = [{run: curves[name] for run, curves in runs.items() if curves[name]} for name in CURVES]
        return print(*(chart(name, curves) for name, curves in zip(CURVES, pictures) if curves), sep="\n\n")
    figure, axes = pyplot.subplots(2, 2, figsize=(8, 5), layout="constrained")
    for name, axis in zip(CURVES, [axes[0, 0], *axes.flat]):  # the loss and the validation loss are one picture
        axis.set(xlabel="step", ylabel=name.removeprefix("val_"))
        for run, curves in runs.items():
            axis.plot(*zip(*curves[name]), marker="o" if name == "val_loss" else None, label=f"{run} {name}")
    axes[0, 0].legend()
    file = os.path.join(next(iter(runs)), "metrics.png")
    figure.savefig(file)
    print(file)


def write_events(runs):
    """Write the curves of each run to FOLDER/tensorboard; what is there from an earlier call is hidden by it."""
    from torch.utils.tensorboard import SummaryWriter
    for folder, curves in runs.items():
        with SummaryWriter(os.path.join(folder, "tensorboard"), purge_step=0) as writer:
            for name, curve in curves.items():
                for step, value in curve:
                    writer.add_scalar(name, value, step)
    print("tensorboard --logdir", *runs)


def chart(title, curves, width=100, height=12):
    """Text picture of {name: [(x, y), ...]}: one letter a curve."""
    marks = dict(zip(curves, itertools.cycle("*o+x#")))
    xs, ys = zip(*itertools.chain(*curves.values()))
    left, right, bottom, top = min(xs), max(xs), min(ys), max(ys)
    grid = [[" "] * width for _ in range(height)]
    for name, curve in curves.items():
        for x, y in curve:
            row = grid[round((top - y) / (top - bottom or 1) * (height - 1))]
            row[round((x - left) / (right - left or 1) * (width - 1))] = marks[name]
    legend = ", ".join(f"{mark} {name}" for name, mark in marks.items())
    rows = "\n".join("".join(row).rstrip() for row in grid)
    return f"{title} {bottom:.4g} to {top:.4g}, steps {left} to {right}: {legend}\n{rows}"


@dataclass
class PlotConfig:
    """Draw the metrics of runs."""
    folders: Annotated[list[str], "runs of train.py (out)"]
    tensorboard: Annotated[bool, "write event files rather than a picture (pip install tensorboard)"] = False


# Flags of train.py that the benchmark does not read, or sets itself.
IDLE = ("out fsdp reshard offload replicas tp timeout activation_checkpoint steps max_skips save_every keep keep_every "
        "async_save resume eval_every eval_tokens log_every profile profile_detail").split()


def time_step(step, run, batches):
    """Numbers of a row: medians of seven steps after two; `spread` is their quartiles' distance over the median.

    `kernels` is how many a step launches; on a CPU it is the operators that no other operator called.
    """
    first, _, *rest = timeit.repeat(lambda: step(run, batches, 0)[0].item(), repeat=9, number=1)
    q1, q2, q3 = sorted(rest)[1::2]  # the second, fourth and sixth of seven
    rate = run.step_tokens / q2
    row = dict(tokens_per_s=rate, spread=(q3 - q1) / q2, mfu=rate * run.meter.flops_per_token / run.meter.peak,
               compile_s=max(0.0, first - q2), peak_mem_gb=peak_memory(run.world.device))
    with tracer() as trace:
        step(run, batches, 0)
    return dict(row, kernels=len(parts(trace.events())[-1]))


def surroundings(train, run, batches, rate):
    """Yield what else a run of `rate` tokens/s waits for, as dicts: loading data alone, checkpoints, generation."""
    seconds = min(timeit.repeat(lambda: [next(batches) for _ in range(run.accumulation)], repeat=5, number=1))
    loaded = run.step_tokens / seconds
    yield {"data loading alone": "", "tokens_per_s": loaded, "times_the_step": loaded / rate}
    for kind in "sync", "async":
        with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(sys.stderr):  # what a save says
            checkpointer = train.checkpoint.Checkpointer(out, asynchronous=kind == "async")
            for number in 1, 2:  # the first one gets the memory that an asynchronous save copies to
                stall = timeit.timeit(lambda: checkpointer.save(number, run.raw, run.optimizers), number=1)
                written = stall + timeit.timeit(checkpointer.finish, number=1)
            yield {"checkpoint": kind, "training_stalled_s": stall, "written_after_s": written}
    new = run.raw.config.seq_len // 2
    seconds = timeit.timeit(lambda: run.raw.eval().generate([[0]], new), number=1)
    yield {"generation": "", "tokens_per_s": new / seconds}


def show(row, as_json):
    """Print a row of the benchmark, a dict."""
    cells = (f"{value:.5g}" if isinstance(value, int | float) else str(value) for value in row.values())
    print(json.dumps(row) if as_json else "  ".join(map("{} {:<7}".format, row, cells)), flush=True)


def main():
    """Benchmark the step of train.py's run, a row for each way to compute it; or `plot` runs, see PlotConfig."""
    import model
    import train

    @dataclass
    class Benchmark(train.TrainConfig):
        """Time the optimizer step of the run that train.py's flags describe, and what else it waits for.

        `profile.py plot --help` is about the curves of runs.
        """
        json: Annotated[bool, "JSON lines instead of a table"] = False

    if sys.argv[1:2] == ["plot"]:
        with train.command(PlotConfig, "profile.py plot", argv=sys.argv[2:]) as config:
            return (write_events if config.tensorboard else plot)(read_curves(config.folders or ["out"]))
    with train.command(Benchmark, "profile.py") as config:
        for name in IDLE:
            if getattr(config, name) != getattr(train.TrainConfig, name):
                train.distributed.refuse(f"profile.py: --{name} has no effect on one process's step: drop it", 2)
        world = train.distributed.World(train.distributed.find_device(config.device), writer=False)
        dtype, why_dtype = train.pick_dtype(config.dtype, world.device)
        compiled, why_compiled = train.pick_compile(config, world, None)
        print(f"rows beside fp32: {why_dtype}; compiled rows: {why_compiled}", file=sys.stderr)
        others, usual = [], model.loss_chunks
        # A dtype of 4 bytes, fp32, is the first row alone; one of 2 bytes is a second.
        for compiled, dtype, recompute, chunked in itertools.product(
                ["off", "on"][:1 + compiled], ["fp32", config.dtype.replace("auto", "bf16")][:4 // dtype.itemsize],
                ["none", "block"], [False, True]):
            row = dict(compile=compiled, dtype=dtype, activation_checkpoint=recompute)
            if world.device.type == "cuda":
                train.torch.cuda.reset_peak_memory_stats()
            with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # Linux: a new high-water mark of the process; elsewhere it is that of all rows so far
            try:
                run = train.setup(replace(config, out=os.devnull, **row), world, train.pick_micro_batch(config, 1))
                tokens = run.micro_batch * run.raw.config.seq_len
                chunks = max(8, usual(tokens, run.raw.config.vocab_size, world.device.type)) if chunked else 1
                model.loss_chunks = lambda *sizes: chunks
                batches = train.data.batches(run.dataset, 0, config.batch_size, run.micro_batch, device=world.device)
                row["loss_chunks"] = str(chunks)
                row |= time_step(train.optimizer_step, run, batches)
                # Of the first row's run.
                others = others or list(surroundings(train, run, batches, row["tokens_per_s"]))
            except RuntimeError as error:
                if not want_of_memory(error):
                    raise
                row["tokens_per_s"] = "out of memory"  # later rows need less
            show(row, config.json)
            run = batches = None
            train.distributed.stop(world)  # frees the model and what was compiled of it
        for row in others:
            show(row, config.json)


if __name__ == "__main__":
    main()
