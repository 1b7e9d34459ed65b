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
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import timeit
from dataclasses import make_dataclass, replace
from typing import Annotated

SPEC = importlib.util.spec_from_file_location("_profile", os.path.join(os.path.dirname(os.__file__), "profile.py"))
STANDARD = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(STANDARD)


def __getattr__(name):
    """A name this module does not define: the standard library's."""
    return getattr(STANDARD, name)


# Dense bf16/fp16 TFLOP/s by a part of the device's name, from the vendors' data sheets (sparse figures are twice that).
# The first match counts, so a longer name stands before the shorter one it contains.
PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "MI300X": 1307,
               "L40S": 362, "L40": 181, "L4": 121, "RTX 5090": 210, "RTX 4090": 165, "RTX 3090": 71}


def peak_flops(device, dtype, tflops=None):
    """(FLOP/s, where the figure is from): `tflops` as given, a known GPU's data sheet in 16 bits, or measured here."""
    import torch
    source = "--peak_tflops"
    if tflops is None and device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        source = f"{torch.cuda.get_device_name(device)}'s dense peak"
        tflops = next((peak for part, peak in PEAK_TFLOPS.items() if part in source), None)
    if tflops:
        return tflops * 1e12, source
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    # The first call chooses and loads the kernel; .item() waits for the device.
    seconds = min(timeit.repeat(lambda: (a @ b)[0, 0].item(), number=1, repeat=4))
    return 2 * size ** 3 / seconds, f"measured here on {size} x {size} matrices"


def synchronize(device):
    """Wait until an accelerator has done what was asked of it; a CPU has already."""
    import torch
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory(device):
    """Most memory used so far in GB: the allocator's on CUDA, the process's resident set elsewhere, None if unknown."""
    import torch
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    with contextlib.suppress(ImportError):  # Windows has none
        import resource
        unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kilobytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class Meter:
    """Throughput between two readings: `start()` when optimizer work begins, `read(tokens)` when some of it is done.

    `flops_per_token` and `peak` (FLOP/s of all devices together) turn tokens per second into MFU.
    """

    def __init__(self, flops_per_token, peak, device):
        self.flops_per_token, self.peak, self.device = flops_per_token, peak, device
        self.start()

    def start(self):
        """Begin anew; what passed since the last reading (an evaluation, a save) does not count."""
        synchronize(self.device)
        self.since, self.waited = timeit.default_timer(), 0.0

    def wait(self, iterator):
        """The iterator's next item; the time it took counts as waiting for data."""
        start = timeit.default_timer()
        item = next(iterator)
        self.waited += timeit.default_timer() - start
        return item

    def read(self, tokens):
        """Metrics of the `tokens` (of all processes) worked on since the last reading, as metrics.jsonl names them."""
        synchronize(self.device)
        rate = tokens / (timeit.default_timer() - self.since)
        metrics = dict(tokens_per_s=rate, mfu=rate * self.flops_per_token / self.peak,
                       peak_mem_gb=peak_memory(self.device), data_wait_s=self.waited)
        self.start()
        return metrics


# ---- python train.py --profile ----

REGIONS = "data", "forward", "backward", "optimizer", "checkpoint"
# Steps: until compilation and caches have settled; traced, but dropped, for tracing itself starts slowly; kept.
SCHEDULE = dict(wait=5, warmup=2, active=3)


class Profiler:
    """torch.profiler over a few steps of a run, see SCHEDULE; without a `folder` the same calls do nothing.

    Use it as the context of the training loop, call `step()` at the end of each turn, and name what a step does by
    `region(name)`. Each process writes trace_rank0.json.gz (for ui.perfetto.dev) and on CUDA, when the run ends, also
    when it ends for want of memory, memory_rank0.pickle (for pytorch.org/memory_viz); rank 0 writes operators.txt and
    summary.txt.
    """

    def __init__(self, folder, device, rank=0, say=print):
        self.folder, self.device, self.rank, self.say, self.trace = folder, device, rank, say, None

    def __enter__(self):
        if self.folder:
            import torch
            self.folder.mkdir(parents=True, exist_ok=True)
            # By default it records the CPU, and CUDA where it is. The schedule starts it.
            self.trace = torch.profiler.profile(schedule=torch.profiler.schedule(**SCHEDULE), on_trace_ready=self.write)
            if self.device.type == "cuda":
                torch.cuda.memory._record_memory_history(max_entries=100_000)

    def __exit__(self, kind, error, traceback):
        if self.folder and self.device.type == "cuda":
            import torch
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory_rank{self.rank}.pickle"))
        if kind and kind.__name__ == "OutOfMemoryError":
            print(f"{error} Take a smaller --micro_batch, --activation_checkpoint block, or --fsdp", file=sys.stderr)
            os._exit(1)  # a tidy exit could wait for processes that wait for this one
        if self.trace:
            self.trace.on_trace_ready = None  # what it has may be half a step
            self.trace.stop()
            self.say(f"no profile: it takes {sum(SCHEDULE.values())} steps, this run had {self.trace.step_num}")

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

    def write(self, trace):
        """Write what torch.profiler has recorded; rank 0 prints the summary."""
        self.trace = None
        trace.export_chrome_trace(str(self.folder / f"trace_rank{self.rank}.json.gz"))
        if self.rank == 0:
            order = f"self_{'device' if self.device.type == 'cuda' else 'cpu'}_time_total"
            (self.folder / "operators.txt").write_text(trace.key_averages().table(order, row_limit=100))
            summary = "\n".join(summarize(trace.events()) + compilations())
            (self.folder / "summary.txt").write_text(summary + "\n")
            self.say(f"---- {self.folder} ----\n{summary}\n----")


def covered(events):
    """Microseconds in which at least one of the events was running."""
    total = until = 0.0
    for start, end in sorted((event.time_range.start, event.time_range.end) for event in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def summarize(events):
    """Lines on where the traced steps' time went, from torch.profiler's events; all shares are of the steps' time.

    Work is kernels on a GPU, operators and compiled graphs on a CPU. Communication is hidden while work is running.
    """
    host = [event for event in events if event.device_type.name == "CPU"]
    device = [event for event in events if event.device_type.name != "CPU" and not event.is_user_annotation]
    talk = [event for event in device or host if event.name.startswith(("nccl", "gloo:"))]
    work = [event for event in device if not event.name.startswith("nccl")] or [
        event for event in host if event.name.startswith("aten::") or "Compiled" in event.name]
    duration = covered(event for event in host if event.name.startswith("ProfilerStep"))
    shares = {name: covered(event for event in host if event.name == name) / duration for name in REGIONS}
    idle = 1 - covered(work + talk) / duration
    exposed = (covered(work + talk) - covered(work)) / duration
    spent = collections.Counter()
    for event in device or host:
        spent[event.name] += event.time_range.elapsed_us() if device else event.self_cpu_time_total
    # In this order: what waits for data or messages is idle, too.
    diagnosis = next(text for share, text in (
        (shares["data"], "data-bound: put --data on a faster disk"),
        (exposed, "communication-bound: take a larger --batch_size, and neither --fsdp nor --tp if it fits without"),
        (idle - shares["checkpoint"], "small kernels: take --compile on or a larger --micro_batch"),
        (1, "compute-bound: take --dtype bf16 where it is fast, --compile on, or more processes")) if share > 0.2)
    return [
        f"{SCHEDULE['active']} steps of {duration / SCHEDULE['active'] / 1e3:,.1f} ms: "
        + ", ".join(f"{name} {time:.1%}" for name, time in shares.items()) + f", other {1 - sum(shares.values()):.1%}",
        f"{'GPU' if device else 'CPU'} idle {idle:.1%}, waiting for data {shares['data']:.1%}, communication hidden "
        f"{covered(talk) / duration - exposed:.1%}, not hidden {exposed:.1%}",
        *(f"{time / duration:6.1%}  {name[:100]}" for name, time in spent.most_common(10)),
        f"diagnosis: {diagnosis}",
    ]


def compilations():
    """Lines on what torch.compile could not take into one graph, or compiled again, and where."""
    from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons
    lines = [f"graph break in {found.user_stack[-1]}: {found.reason}" for found in graph_break_reasons]
    lines += [f"recompiled {found.co_name} ({found.co_filename}:{found.co_firstlineno}): {found.recompile_reason}"
              for found in get_compilation_metrics() if found.recompile_reason]
    return list(dict.fromkeys(line.splitlines()[0] for line in lines))


# ---- python profile.py ----

CURVES = "loss", "val_loss", "lr", "grad_norm", "tokens_per_s"


def plot(folders):
    """Draw metrics.jsonl of runs: FOLDER/metrics.png in the first one's by matplotlib, without it in the terminal."""
    runs = {}
    for folder in folders:
        with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as file:  # a power cut may leave torn lines
            lines = [json.loads(line) for line in file if line.startswith('{"step": ') and line.endswith("}\n")]
        if not lines:
            raise ValueError(f"{file.name} has no numbers yet")
        runs[folder] = {name: [(line["step"], line[name]) for line in lines if line.get(name) is not None]
                        for name in CURVES}
    try:
        from matplotlib.figure import Figure
    except ImportError:
        pictures = [{run: curves[name] for run, curves in runs.items() if curves[name]} for name in CURVES]
        return print(*(chart(name, curves) for name, curves in zip(CURVES, pictures) if curves), sep="\n\n")
    figure = Figure(figsize=(8, 12), layout="constrained")
    for name, axis in zip(CURVES, figure.subplots(len(CURVES), sharex=True)):
        for run in runs:
            axis.plot(*zip(*runs[run][name]), marker=".", label=run)
        axis.set_ylabel(name)
    axis.set_xlabel("step")
    axis.legend()
    figure.savefig(os.path.join(folders[0], "metrics.png"))
    print(os.path.join(folders[0], "metrics.png"))


def chart(title, curves, width=100, height=12):
    """Text picture of {name: [(x, y), ...]}: one letter a curve."""
    marks = dict(zip(curves, itertools.cycle("*o+x#")))
    points = [(x, y, marks[name]) for name, curve in curves.items() for x, y in curve]
    xs, ys, _ = zip(*points)
    grid = [[" "] * width for _ in range(height)]
    for x, y, mark in points:
        row = (max(ys) - y) / (max(ys) - min(ys) or 1) * (height - 1)
        grid[round(row)][round((x - min(xs)) / (max(xs) - min(xs) or 1) * (width - 1))] = mark
    legend = ", ".join(f"{mark} {name}" for name, mark in marks.items())
    return "\n".join([f"{title} {min(ys):.4g} to {max(ys):.4g}, steps {min(xs)} to {max(xs)}: {legend}",
                      *("".join(row).rstrip() for row in grid)])


def surroundings(train, run, batches):
    """Yield what else a run waits for, as dicts: loading data alone, a checkpoint of either kind, generation."""
    tokens = run.config.batch_size * run.raw.config.seq_len
    seconds = min(timeit.repeat(lambda: [next(batches) for _ in range(run.accumulation)], repeat=5, number=1))
    yield {"data loading alone": "", "tokens_per_s": tokens / seconds}
    stalls = []
    for kind in "sync", "async":
        with tempfile.TemporaryDirectory() as out:
            checkpointer = train.checkpoint.Checkpointer(out, asynchronous=kind == "async")
            for number in 1, 2:  # the first one gets the memory that an asynchronous save copies to
                start = timeit.default_timer()
                checkpointer.save(number, run.raw, run.optimizers)
                stalls.append(timeit.default_timer() - start)
                checkpointer.finish()
            yield {"checkpoint": kind, "training_stalled_s": stalls[-1], "share_of_sync": stalls[-1] / stalls[1],
                   "written_after_s": timeit.default_timer() - start}
    new = run.raw.config.seq_len // 2
    seconds = timeit.timeit(lambda: run.raw.eval().generate([[0]], new), number=1)
    yield {"generation": "", "tokens_per_s": new / seconds}


def show(row, as_json):
    """Print a row of the benchmark, a dict."""
    print(json.dumps(row) if as_json else "  ".join(f"{name} {value:<6.6}" for name, value in row.items()), flush=True)


def main():
    """Benchmark the optimizer step of the run that train.py's flags describe: a row for each way to compute it.

    Medians of seven steps after two; `spread` is the distance of their quartiles as a share of the median.
    """
    import model
    import train
    others, flags = [], [("json", Annotated[bool, "JSON lines instead of a table"], False)]
    try:
        if sys.argv[1:2] == ["plot"]:
            if wrong := [word for word in sys.argv[2:] if word.startswith("-")]:
                train.distributed.refuse(f"profile.py plot takes folders of runs, found {wrong[0]}", 2)
            return plot(sys.argv[2:] or ["out"])
        config = train.parse_args(make_dataclass("Benchmark", flags, bases=(train.TrainConfig,)), "profile.py")
        config.resume = "auto"
        if config.fsdp or config.tp > 1 or config.profile:
            train.distributed.refuse("profile.py: --fsdp, --tp and --profile have no effect on one process's step", 2)
        world = train.distributed.World(train.distributed.find_device(config.device), writer=False)
        dtype, why_dtype = train.pick_dtype(config.dtype, world.device)
        compiled, why_compiled = train.pick_compile(config, world.device)
        print(f"rows beside fp32: {why_dtype}; compiled rows: {why_compiled}", file=sys.stderr)
        for compiled, dtype, recompute, chunks in itertools.product(
                ["off", "on"][:1 + compiled], ["fp32", config.dtype.replace("auto", "bf16")][:4 // dtype.itemsize],
                ["none", "block"], [1, 8]):
            if world.device.type == "cuda":
                train.torch.cuda.reset_peak_memory_stats()
            with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # Linux: a new high-water mark of the process; elsewhere it is that of all rows so far
            row = dict(compile=compiled, dtype=dtype, activation_checkpoint=recompute)
            run = train.setup(replace(config, out=os.devnull, **row), world, train.pick_micro_batch(config, 1))
            length, vocabulary = run.raw.config.seq_len, run.raw.config.vocab_size
            model.CHUNK_BYTES = 4 * vocabulary * -(-run.micro_batch * length // chunks)
            batches = train.data.batches(run.dataset, 0, config.batch_size, run.micro_batch, device=world.device)
            first, _, *rest = timeit.repeat(lambda: train.optimizer_step(run, batches, 0)[0].item(), repeat=9, number=1)
            q1, q2, q3 = sorted(rest)[1::2]
            rate = config.batch_size * length / q2
            row |= dict(loss_chunks=str(chunks), tokens_per_s=rate, spread=(q3 - q1) / q2, compile_s=first - q2,
                        mfu=rate * run.meter.flops_per_token / run.meter.peak, peak_mem_gb=peak_memory(world.device))
            show(row, config.json)
            others = others or list(surroundings(train, run, batches))  # of the first row's run
            del run, batches
            train.distributed.stop(world)  # frees the model and what was compiled of it
        for row in others:
            show(row, config.json)
    except (ValueError, OSError, ImportError, train.torch.OutOfMemoryError) as error:
        sys.exit(f"profile.py: {error}")
    except KeyboardInterrupt:
        sys.exit("profile.py: interrupted")


if __name__ == "__main__":
    main()
