"""Processes, meshes, wrappers: the same run on one process, or as DDP, FSDP2, HSDP and tensor parallel on many.

All layouts are one `DeviceMesh` with the dimensions "replicate" (the same parameters), "shard" (FSDP2's `fully_shard`)
and "tp" (tensor parallel, innermost: its neighbours talk in every layer). `start` builds it, `parallelize` applies it.

    torchrun --standalone --nproc_per_node=8 train.py --fsdp                     # what this file serves
    python distributed.py --model llama-3.1-8b --gpus 64 --fsdp --gpu H100       # will it fit, and how fast is it?

Shapes: B batch, T tokens, C model width, V vocabulary, H heads, D head width.
"""
import atexit
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import combinations
from math import gcd, prod
from typing import Annotated, Literal

import torch
import torch.distributed as dist

# torch.distributed.tensor takes a second to import: the functions that need it import it, one process never does.


@dataclass
class World:
    """This process's place among all. The defaults are one process without a process group: every method is free."""
    device: torch.device
    rank: int = 0
    size: int = 1
    writer: bool = True  # whether this process prints, and writes the files of which a run has one
    data_rank: int = 0  # the processes of one tensor-parallel group read the same data: they share a data rank
    data_size: int = 1
    mesh: "torch.distributed.device_mesh.DeviceMesh | None" = None
    entered: ExitStack = field(default_factory=ExitStack)  # contexts that last until `stop`

    def has(self, dimension):
        """Whether the mesh has this dimension: "replicate", "shard" or "tp"."""
        return self.mesh is not None and dimension in self.mesh.mesh_dim_names

    def sum(self, tensor):
        """Sum of `tensor` over the data ranks: of counts and losses, which tensor-parallel neighbours share."""
        tensor = tensor.detach().clone()
        for dimension in filter(self.has, ("replicate", "shard")):
            dist.all_reduce(tensor, group=self.mesh.get_group(dimension))
        return tensor

    def any(self, flag):
        """The largest `flag`, a number or bool, of all processes: a signal to stop may have reached only some."""
        votes = torch.tensor(int(flag))  # on the CPU, through gloo: asking every step must not make a GPU wait
        if self.mesh is not None:
            dist.all_reduce(votes, dist.ReduceOp.MAX)
        return votes.item()

    @contextmanager
    def first(self):
        """Run the body on rank 0, then on the first process of every other machine, then on the rest.

        A body that does nothing when its files exist does its work once, on a shared file system or on separate disks.
        """
        turn = 0 if self.rank == 0 else 2 if setting("LOCAL_RANK") else 1
        # A group of its own, for its time-out: preparing data may take hours, a hung gradient must not.
        patient = None if self.mesh is None else dist.new_group(backend="gloo", timeout=timedelta(days=7))
        for current in range(3):
            if current == turn:
                yield
            if self.mesh is not None:
                dist.barrier(patient)


def setting(name, default=0):
    """An environment variable that torchrun or Slurm sets, as a number; nothing else here reads them."""
    return int(os.environ.get(name, default))


def layout(fsdp=False, replicas=1, tp=1, processes=None, timeout=None, **sizes):
    """Mesh dimensions of a launch, outermost first: {} without torchrun, else for example {"shard": 4, "tp": 2}.

    `processes`: how many there are, by default torchrun's WORLD_SIZE. `sizes`: the numbers that tensor parallelism
    divides, by name (n_head=12). Raises ValueError before anything waits: call it as early as the numbers are known.
    """
    processes = processes or setting("WORLD_SIZE")
    size, unit = max(1, processes), replicas * tp
    flags = {"--fsdp": fsdp, f"--replicas {replicas}": replicas > 1, f"--tp {tp}": tp > 1,
             f"--timeout {timeout}": timeout}
    asked = " ".join(flag for flag, given in flags.items() if given)
    if replicas > 1 and not fsdp:
        raise ValueError(f"--replicas {replicas} has no effect without --fsdp: DDP has a replica on every process")
    if asked and not processes:
        raise ValueError(f"{asked} needs several processes, found one without torchrun: run torchrun --standalone "
                         f"--nproc_per_node={max(2, unit)} {os.path.basename(sys.argv[0])} {asked}")
    if size % unit:
        raise ValueError(f"{asked}: {size} processes do not divide by {unit}, start {max(size, unit) // unit * unit}")
    if tp > 1 and not fsdp and size != tp:
        raise ValueError(f"--tp {tp} alone takes {tp} processes, found {size}: add --fsdp, or start {tp}")
    for name, value in sizes.items():
        if value % tp:
            raise ValueError(f"{name} {value} is not divisible by --tp {tp}: take a divisor of {gcd(*sizes.values())}")
    if not fsdp:
        return {"tp": tp} if tp > 1 else {"replicate": size} if processes else {}
    shape = {"replicate": replicas, "shard": size // unit, "tp": tp}
    return {name: n for name, n in shape.items() if n > 1 or name == "shard"}


def find_device(name="auto"):
    """torch.device of this process: its LOCAL_RANK's GPU under torchrun. "auto": cuda, mps (alone) or cpu."""
    here, gpus, mps = setting("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count(), torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if gpus else "mps" if mps and setting("WORLD_SIZE", 1) == 1 else "cpu"
    if name == "cuda" and here > gpus:  # seen by every process of the machine, so that all fail alike
        advice = f"start --nproc_per_node={gpus}" if gpus else "take --device cpu, or install torch with CUDA"
        raise ValueError(f"--device cuda: {here} processes here need a GPU each, found {gpus}: {advice}")
    if name == "mps" and not mps:
        raise ValueError("--device mps: this machine has none, take --device cpu")
    return torch.device(name, setting("LOCAL_RANK")) if name == "cuda" else torch.device(name)


def start(device="auto", fsdp=False, replicas=1, tp=1, timeout=None, flags=None, **sizes):
    """Join the processes that torchrun started (without torchrun: be one process) -> World.

    `timeout`: seconds after which a collective that some process has not joined fails, by default 600. `flags`: what
    all must have alike, see `same`. `sizes`: see `layout`. All else is checked before the process group is awaited;
    raises ValueError.
    """
    shape, device = layout(fsdp, replicas, tp, timeout=timeout, **sizes), find_device(device)
    if not shape:
        return World(device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    timeout = timeout or 600
    try:
        store, rank, size = meet(timeout)
    except RuntimeError as error:
        raise ConnectionError(f"{error}".splitlines()[0] + ": see what the first machine says") from None
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=size,
                            timeout=timedelta(seconds=timeout), device_id=device if cuda else None)
    try:
        same(flags or {})
    except ValueError:
        dist.destroy_process_group()  # or gloo aborts at some exits
        raise
    world = connect(shape, device)
    for group in map(world.mesh.get_group, shape):  # a mesh's own groups would wait half an hour
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), group)
    stand_together(world, store)
    return world


def same(values):
    """ValueError, on all processes, unless `values`, a dict, is the same on all; without a process group it is."""
    everyone = [(socket.gethostname(), values)]
    if dist.is_available() and dist.is_initialized():
        everyone *= dist.get_world_size()
        dist.all_gather_object(everyone, everyone[0])
    host, first = everyone[0]
    for rank, (other, found) in enumerate(everyone):
        for odd in first | found:
            here, there = (each.get(odd, "unknown") for each in (first, found))
            if here != there:
                raise ValueError(f"{odd} is {here} on process 0 ({host}), {there} on process {rank} ({other}): "
                                 "start all machines alike")


def meet(timeout, trouble=""):
    """(store, rank, number of processes): torchrun's store, under a name that this attempt alone knows.

    All raise ConnectionError, when they have come, if one of them has `trouble`; TimeoutError tells who has not come.

    torchrun keeps one store over its restarts, with the addresses of processes that are dead (pytorch issue 135712),
    and no number of the attempt that all machines agree on. So each process asks under a name that nobody had before,
    and rank 0 answers whatever is asked, old questions too, until all processes of this attempt have its answer.
    """
    store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
    attempt, end = os.urandom(16).hex(), time.monotonic() + timeout
    if rank:
        store.set(f"ask {rank}", attempt)
        attempt = store.get(f"answer {attempt}").decode()  # waits for it
        store.set(f"{attempt} {rank}", trouble)
    while missing := [other for other in range(1, 1 if rank else size) if not store.check([f"{attempt} {other}"])]:
        for other in filter(lambda other: store.check([f"ask {other}"]), missing):
            store.set("answer " + store.get(f"ask {other}").decode(), attempt)
        if time.monotonic() > end:
            raise TimeoutError(f"processes {missing} have not come within {timeout} s: see what they say")
        time.sleep(0.01)
    if not rank:
        troubles = [trouble, *(store.get(f"{attempt} {other}").decode() for other in range(1, size))]
        store.set(f"{attempt} trouble", next(filter(None, troubles), ""))
    if trouble := store.get(f"{attempt} trouble").decode():
        raise ConnectionError(trouble)
    return dist.PrefixStore(attempt, store), rank, size


def connect(shape, device):
    """World of the mesh dimensions `shape`, over all processes of the existing process group."""
    mesh = dist.init_device_mesh(device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
    if {"shard", "tp"} <= set(shape):
        mesh["shard", "tp"]._flatten()  # DTensor finds it, and sums the gradient norm over both with one collective
        # It warns where it cannot merge two gathers into one, as in Muon and when whole weights are exported.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    tp, rank, size = shape.get("tp", 1), dist.get_rank(), dist.get_world_size()
    world = World(device, rank, size, rank == 0, rank // tp, size // tp, mesh)
    if world.has("tp"):
        from torch.distributed.tensor.parallel import loss_parallel
        # Logits stay sharded over the vocabulary: the softmax exchanges a maximum and a sum per token, not V logits.
        world.entered.enter_context(loss_parallel())
    return world


def stand_together(world, store):
    """From here until `stop`, when one process ends by an error or any exit, all do: within seconds, on all machines.

    torchrun ends the processes of its own machine; those of the others would wait in a collective for --timeout. Of one
    that is killed they hear from torchrun, by a closed connection, or after --timeout; who it is shows by its pulse.
    """
    name, pulse, stopped = f"process {world.rank} on {socket.gethostname()}", f"pulse {world.rank}", threading.Event()
    say, show = partial(print, file=sys.stderr, flush=True), sys.excepthook

    def pulses():
        return ask(lambda: [store.get(f"pulse {rank}").decode() for rank in range(world.size)])

    def silent():
        before = pulses()
        time.sleep(3)
        if not (before and (after := pulses())):  # its torchrun may end meanwhile
            return ["the machine that holds torchrun's store,"]
        return [now for now, then in zip(after, before) if now and now == then]

    def leave(*error):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which would cut off what is said here
        first = ask(lambda: store.add("ends", 1)) in (1, None)
        if error and first:
            show(*error)
            if names := silent():
                say("most likely because of", *names, "which was killed, or hangs")
        elif error:  # most likely a consequence, as a closed connection is
            say(f"{name} ends, too: {error[0].__name__}:", str(error[1]).partition("\n")[0])
        ask(lambda: (store.set(pulse, ""), store.compare_set("ended", "", name)))  # the first one stays
        os._exit(1)  # at once: a tidy exit could wait for peers that wait for this process

    def watch(store):
        while not stopped.wait(1):
            try:
                store.set(pulse, f"{name}, last heard at {time.strftime('%X')},")
                why = f"{store.get('ended').decode()} has ended, and says why" if store.check(["ended"]) else ""
            except RuntimeError:
                why = "torchrun's store has gone: torchrun on the first machine was ended, or that machine is down"
            if why and not stopped.is_set():
                if not setting("LOCAL_RANK"):
                    say(f"{name} ends because {why}")
                os._exit(1)
    store.set(pulse, f"{name}, never heard,")
    sys.excepthook = leave
    atexit.register(leave)
    for end in stopped.set, partial(setattr, sys, "excepthook", show), partial(atexit.unregister, leave):
        world.entered.callback(end)
    threading.Thread(target=watch, args=(store.clone(),), daemon=True).start()  # a connection is one thread's


def ask(request):
    """What `request()` to a store returns; None if the store has gone, or does not answer within ten seconds."""
    answers = [None]

    def run():
        with suppress(RuntimeError):
            answers[0] = request()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    return answers[0]


def refuse(message, code):
    """End with one line on stderr and exit code `code`: for an error that most likely all processes have found.

    The machine's first says it at once, whereupon torchrun ends the others before they repeat it. An error that one
    process alone has found is printed, too, after these ten seconds. Mistakes of usage (2) are told to other machines.
    """
    first = not setting("LOCAL_RANK")
    if first:
        print(message, file=sys.stderr, flush=True)
    if code == 2 and setting("WORLD_SIZE", 1) > 1 and not dist.is_initialized():
        with suppress(OSError, ValueError, RuntimeError):  # others may wait for this process
            meet(30, f"process {setting('RANK')} on {socket.gethostname()} has ended: {message}")
    if not first:
        time.sleep(10)
        print(message, file=sys.stderr, flush=True)
    raise SystemExit(code)


def stop(world):
    """Leave the process group. Call it when the function that held model and optimizer has returned.

    gloo aborts about one exit in ten (code -6) while a wrapped model is alive, so garbage is collected first. After an
    exception do not call it: the peers may be stuck in a collective; `stand_together` ends them.
    """
    world.entered.close()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # compiled code holds on to the model
    gc.collect()
    if world.mesh is not None:
        dist.barrier()  # nobody leaves while another still communicates, or uses the store
        dist.destroy_process_group()


# ---- the wrappers, in the order in which they must be applied ----

def parallelize(raw, world, *, compile=False, seed=0, offload=False, **options):
    """Take `raw`, a model on the meta device, to this process's share of it with initial weights -> the callable model.

    `raw` stays the same object with the same parameter names, free of wrapper prefixes. Build the optimizer afterwards:
    sharding replaces the parameters, and an optimizer built before it holds tensors that training never touches.
    `offload`: parameters, gradients and optimizer live in the host's memory, and each block visits the GPU to compute.
    `options`: see `shard`.
    """
    shard(raw, world, compile=compile, offload=offload, **options)
    materialize(raw, "cpu" if offload else world.device, seed)
    model = torch.compile(raw) if compile and not (world.has("shard") or world.has("tp")) else raw
    if world.has("replicate") and not world.has("shard"):
        # Gradients that are views into the all-reduce's buckets save a copy of the model.
        model = torch.nn.parallel.DistributedDataParallel(
            model, process_group=world.mesh.get_group("replicate"), gradient_as_bucket_view=True)
    return model


def shard(raw, world, param_dtype=torch.float32, activation_checkpoint="none", compile=False,
          reshard_after_forward=True, offload=False):
    """What happens on the meta device: tensor parallel -> activation checkpoint -> compile per block -> fully_shard.

    Each step sees what the one before left: one graph per block holds the tensor-parallel collectives and the
    checkpoint's recomputation, and FSDP2's hooks, which no graph can hold, stay outside.
    """
    if world.has("tp"):
        tensor_parallel(raw, world)
    for block in raw.blocks:
        if activation_checkpoint != "none":
            checkpoint_activations(block, selective=activation_checkpoint == "selective")
        if compile and (world.has("shard") or world.has("tp")):
            block.compile()  # in place: no `_orig_mod` in the names. All blocks share one compilation.
    if world.has("shard"):
        fully_shard_blocks(raw, world, param_dtype, reshard_after_forward, offload)


# Module name -> style. Megatron's pairing (Shoeybi et al. 2019): a column-wise product leaves each process a share of
# the heads or hidden units, the row-wise product after it sums over them: one collective for two matrices. Between the
# pairs activations are sharded over the sequence (Korthikanti et al. 2022): norms and residuals cost 1/tp as much.
# A "norm" is read by products, "heads" are modules whose forward is given one tensor, (B, T, H, D). There is no row for
# a product that each process would compute whole, as a router's: nobody would add up the parts of its gradient.
PLAN = {
    "embed": "table", "position": "table", "norm": "norm", "head": "column",
    "attn_norm": "norm", "q": "column", "k": "column", "v": "column", "q_norm": "heads", "k_norm": "heads", "o": "row",
    "mlp_norm": "norm", "gate": "column", "up": "column", "down": "row"}


def tensor_parallel(raw, world):
    """Split every module named in PLAN over the mesh's "tp" dimension. Activations between blocks are (B, T/tp, C)."""
    from torch.distributed.tensor import Replicate, Shard, parallel
    styles = {
        "column": [parallel.ColwiseParallel()],
        "row": [parallel.RowwiseParallel(output_layouts=Shard(1))],  # a reduce-scatter over the sequence
        "table": [parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))],
        # The norm works on T/tp tokens; its output is gathered once for all the products that read it.
        "norm": [parallel.SequenceParallel(), parallel.PrepareModuleOutput(
            output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False)],
        # (B, T, H/tp, D): as DTensors, or each process would keep the gradient of its own heads.
        "heads": [parallel.SequenceParallel(sequence_dim=2, use_local_output=True)]}
    frozen = [name for name, p in raw.named_parameters() if not p.requires_grad]
    mesh = world.mesh["tp"]  # once: each call makes an object, and inductor fails on several in a graph (torch 2.13)
    for name, module in list(raw.named_modules()):
        for style in styles.get(PLAN.get(name.rpartition(".")[2]), []):
            parallel.parallelize_module(module, mesh, style)
    if name := next((name for name, p in raw.named_parameters() if not hasattr(p, "placements")), None):
        raise ValueError(f"--tp: {name} is of a module that has no row in distributed.PLAN: add one (a bare parameter "
                         'needs a module of its own; row "heads" is for what works on (B, T, H, D))')
    for name in frozen:
        raw.get_parameter(name).requires_grad_(False)  # SequenceParallel makes new parameters
    heads = raw.config.n_head // mesh.size()
    for block in raw.blocks:  # for rules and formulas that ask for them
        block.attn.heads = range(mesh.get_local_rank() * heads, (mesh.get_local_rank() + 1) * heads)
    # Not the collective's pending result: a compiled block that is given one fails in backward (torch 2.13).
    raw.embed.register_forward_hook(lambda module, inputs, output: output.clone())
    # The caller gets a plain tensor again; a copy, because FSDP2 warns of views.
    raw.register_forward_hook(lambda module, inputs, output: whole(output).clone())


def checkpoint_activations(block, selective):
    """Keep only the block's input, recompute the rest in backward; `selective` also keeps matmul and attention outputs.

    The function below must be a real one: of a functools.partial as `forward`, `block.compile()` captures no graph.
    """
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    # Under torch.compile it would say for each block that `selective` is experimental there.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    forward = block.forward
    options = dict(context_fn=partial(create_selective_checkpoint_contexts, expensive_ops())) if selective else {}

    def checkpointed(*inputs, **named):
        return checkpoint(forward, *inputs, use_reentrant=False, **options, **named)
    block.forward = checkpointed


def expensive_ops():
    """Operators whose outputs cost more to recompute than to keep: matrix products and every attention kernel.

    Flex is among them where the whole block is compiled; by itself it is a compiled function that nobody looks into.
    """
    from torch.nn.attention import flex_attention  # noqa: F401, it defines the operator of this name
    kernels = "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"
    names = ["mm", "addmm", "bmm"] + [f"_scaled_dot_product_{kernel}" for kernel in kernels]
    return [torch.ops.higher_order.flex_attention, *(getattr(torch.ops.aten, name).default for name in names)]


def fully_shard_blocks(raw, world, param_dtype, reshard_after_forward, offload):
    """FSDP2 (ZeRO-3): each process keeps 1/shard of every parameter; a block is whole only while it computes.

    Embedding, last norm and head stay with the root: both ends of the forward pass need them, and a tied pair in two
    groups raises. On a ("replicate", "shard") mesh the same call is HSDP: sharded inside, all-reduced across.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    options = dict(
        mesh=world.mesh["replicate", "shard"] if world.has("replicate") else world.mesh["shard"],
        offload_policy=CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if offload else OffloadPolicy(),
        # Inputs keep their dtype: the rotary tables are fp32, and bf16 has 8 bits for an angle.
        mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False))
    for block in raw.blocks:
        # The last block is the first that backward needs: freed, it would be gathered again at once.
        fully_shard(block, **options, reshard_after_forward=reshard_after_forward and block is not raw.blocks[-1])
    fully_shard(raw, **options, reshard_after_forward=False)
    # Gather the next block while this one computes: in forward FSDP2 does so by itself only when the CPU runs ahead of
    # the GPU; in backward it always gathers the block that came before.
    for block, following in zip([raw, *raw.blocks], raw.blocks):
        block.set_modules_to_forward_prefetch([following])


@torch.no_grad()
def materialize(raw, device, seed):
    """Memory for this process's shards, then initial weights, the same in every layout.

    Each process draws one parameter after the other as a whole and keeps its own piece: nothing is communicated, and no
    process ever holds more than one whole parameter.
    """
    if name := next((name for name, _ in raw.named_buffers()), None):
        raise ValueError(f"{name} is a buffer, which nothing fills: make it in forward, or a parameter of GPT.initial")
    raw.to_empty(device=device)
    for name, parameter in raw.named_parameters():
        parameter.copy_(share(raw.initial(name, seed), parameter))


# ---- the optimizer step ----

def accumulate(model, last):
    """Call it before each micro-batch's forward: gradients are exchanged after the `last` one of a step alone.

    Before the *forward*, where DDP reads its flag: set between forward and backward it gives wrong gradients.
    """
    if hasattr(model, "require_backward_grad_sync"):  # DDP
        model.require_backward_grad_sync = last
    elif hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(last)


def reshard(raw):
    """Call it after forward passes without backward: FSDP2 left gathered what a backward pass would need first."""
    for module in filter(lambda module: hasattr(module, "reshard"), raw.modules()):
        module.reshard()


@torch.no_grad()
def clip_grad_norm(parameters, max_norm):
    """Scale the gradients to a global norm of at most `max_norm` (0: leave them) -> the norm before, a plain scalar."""
    parameters = [p for p in parameters if p.grad is not None]
    for p in parameters:
        if hasattr(p.grad, "placements") and p.grad.placements != p.placements:
            # A norm's weight: each tensor-parallel process has the gradient of its own tokens or heads; this sums them.
            p.grad = p.grad.redistribute(placements=p.placements)
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters]))  # the one all-reduce
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def whole(tensor):
    """The whole of a sharded tensor, on each process; a plain tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def share(tensor, like):
    """This process's piece of a whole `tensor`, laid out as the parameter `like`; nothing is communicated."""
    if not hasattr(like, "device_mesh"):
        return tensor
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


# ---- the planner ----

# GPU -> memory (GB), dense bf16 TFLOP/s, and GB/s that one GPU sends to its neighbours in the machine and to other
# machines. Vendors' figures: NVLink in one direction; a network port of 200 (A100) or 400 Gbit/s for each GPU.
GPUS = dict(A100=(80, 312, 300, 25), H100=(80, 989, 450, 50), H200=(141, 989, 450, 50), B200=(180, 2250, 900, 50))
EFFICIENCY = 0.5  # assumed share of that peak which the kernels of a block reach when they wait for nothing
STATES = {"AdamW": 2, "Muon": 1, "SGD": 1}  # fp32 tensors that an optimizer keeps for a parameter: moments, momentum


def pretend(shape, processes):
    """World of a launch of any size in one process, whose collectives do nothing, until its `entered` is closed."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    world = connect(shape, torch.device("cpu"))
    world.entered.callback(dist.destroy_process_group)
    return world


def activation_bytes(block, policy, tp=1, stream=2):
    """Bytes that one token leaves in `block` for the backward pass under an activation checkpoint policy.

    Matrix products and what they read are bf16; the residual `stream`, from which norms read, has 2 bytes or 4.
    """
    linear = [(name.rpartition(".")[2], part) for name, part in block.named_modules() if hasattr(part, "in_features")]
    C = dict(linear)["q"].in_features
    heads, hidden = (sum(part.in_features for name, part in linear if name == of) for of in ("o", "down"))
    gated = sum(part.out_features for name, part in linear if name == "gate")
    columns = sum(part.out_features for name, part in linear if PLAN[name] == "column")
    return {
        "block": stream * C / tp,  # its input
        "selective": stream * C / tp + 2 * (2 * C + (columns + heads) / tp),  # and what products and attention made
        # Norms' inputs and outputs (whole under tp), products, attention, the activation function, the gated product.
        "none": 2 * stream * C / tp + 2 * (2 * C + (columns + heads + hidden + gated) / tp)}[policy]


def plan(build, optimizers, gpus, fsdp=False, replicas=1, tp=1, micro_batch=1, seq_len=1024, reshard=True,
         activation_checkpoint="none", accumulation=1, gpu="H100", chunks=1, machine=8, **sizes):
    """Predict a launch -> dict: memory and sent (bytes per GPU by purpose), what the seconds a step are `spent` on,
    mfu, tokens_per_s, whether it fits, and the bytes `saved` in a checkpoint.

    `build()` makes the model, on the meta device, where it is sharded as the launch would, and `optimizers(model)` the
    list of its optimizers. Matrix products in bf16; parameters, gradients and moments in fp32; the loss in so many
    `chunks`. `machine`: GPUs that share fast links. Raises ValueError where the layout is impossible, see `layout`.
    """
    shape = layout(fsdp, replicas, tp, gpus, seq_len=seq_len, **sizes)
    with torch.device("meta"):
        raw = build()
    shards, recomputed = shape.get("shard", 1), activation_checkpoint == "block"
    total, blocks = raw.num_params(), [sum(p.numel() for p in block.parameters()) for block in raw.blocks]
    root, tokens, layers = total - sum(blocks), micro_batch * seq_len, len(blocks)
    vocabulary, C = raw.embed.weight.shape
    kept, made = (tokens * activation_bytes(raw.blocks[0], policy, tp, stream=2 if fsdp else 4)
                  for policy in (activation_checkpoint, "none"))
    flops = raw.flops_per_token(seq_len) * tokens * accumulation / tp
    world = pretend(shape, gpus)
    with world.entered:
        shard(raw, world)
        elements = {p: (p.to_local() if hasattr(p, "to_local") else p).numel() for p in raw.parameters()}
        held = [(type(optimizer).__name__, p) for optimizer in optimizers(raw)
                for group in optimizer.param_groups for p in group["params"]]
        hidden = [sorted(p.shape) for name, p in held if name == "Muon"]
    own, gathered = sum(elements.values()), min(3, layers) if reshard else layers
    memory = {
        "parameters": 4 * own,
        # FSDP2 accumulates whole gradients, for it exchanges them with the last micro-batch alone.
        "gradients": 4 * (total // tp if fsdp and accumulation > 1 else own),
        "moments": 4 * sum(STATES[name] * elements[p] for name, p in held),  # AdamW's counters, 4 bytes each, aside
        # bf16 weights. FSDP2: root, last block, the block at work and the next one; otherwise autocast's copy of all.
        "gathered": 2 * (root + gathered * max(blocks) if fsdp else total) // tp,
        "activations": int(layers * kept),
        # In fp32 the softmax, its gradient and that of the logits; the head's gradient: in bf16, summed in fp32.
        "logits": int(12 * tokens * vocabulary / chunks + 6 * vocabulary * C) // tp,
        # A block at work in backward: what it recomputes; FSDP2's bf16 gradients and their copy to reduce-scatter.
        "block": int(made - kept) + 6 * max(blocks) * fsdp // tp,
        "root": 6 * root * fsdp // tp}  # the same gradients of embedding and head, when backward is nearly over
    # Not the sum: while the logits live no block works, and when the root's gradients come the activations are gone.
    early = memory["gathered"] + memory["activations"] + max(memory["logits"], memory["block"])
    early += memory["gradients"] if accumulation > 1 or not fsdp else 0  # DDP's buckets are always there
    memory["peak"] = memory["parameters"] + memory["moments"] + max(early, memory["gradients"] + memory["root"])
    limit, peak, inside, outside = GPUS[gpu]
    sent = {  # a ring of n sends (n - 1) / n of a tensor to gather or to scatter it, twice that to all-reduce it
        # In bf16 for forward and backward, fp32 gradients; Muon gathers the fp32 updates of its matrices.
        "shard": (1 - 1 / shards) / tp * (total * ((2 + 2 * reshard) * accumulation + 4) + 4 * sum(map(prod, hidden))),
        "replicate": 2 * 4 * total / tp / shards * (1 - 1 / shape.get("replicate", 1)),
        # A gather and a scatter of (B, T, C) for each half of a block: forward, backward, again where it is recomputed.
        "tp": 2 * tokens * C * (1 - 1 / tp) * layers * 4 * accumulation * (2 + recomputed)}
    spans = {"tp": tp, "shard": tp * shards, "replicate": gpus}  # GPUs over which neighbours in a dimension are spread
    waits = {name: n / 1e9 / (outside if gpus > machine and machine % spans[name] else inside)
             for name, n in sent.items()}
    # On each GPU Muon computes, five times, x x^T, its square and their product with x, of all its matrices x.
    flops_muon = sum(5 * (4 * rows ** 2 * columns + 2 * rows ** 3) for rows, columns in hidden)
    spent = {"model": flops * (4 / 3 if recomputed else 1) / (peak * 1e12 * EFFICIENCY),
             "Muon": flops_muon / (peak * 1e12 * EFFICIENCY), "sent meanwhile": waits["shard"] + waits["replicate"],
             "tp waits": waits["tp"]}  # prefetch hides the former behind the work, nothing hides tp's
    seconds = max(spent["model"] + spent["Muon"], spent["sent meanwhile"]) + spent["tp waits"]
    saved = 4 * total + 4 * sum(STATES[name] * p.numel() for name, p in held)
    return dict(memory=memory, sent=sent, spent=spent, saved=saved, seconds=seconds,
                tokens_per_s=tokens * accumulation * gpus / tp / seconds, mfu=flops / seconds / (peak * 1e12),
                fits=memory["peak"] < 0.92e9 * limit)


def smallest_change(predict, gpus, batch_size, micro_batch):
    """The fewest options to change (a dict) for `predict(**change)` to fit; None when none of those tried does."""
    halves = [dict(micro_batch=micro_batch >> n) for n in range(1, micro_batch.bit_length())]  # they cost no time
    ladder = [("activation_checkpoint", "selective"), ("activation_checkpoint", "block"), ("fsdp", True),
              ("micro_batch", 1), ("tp", 2), ("tp", 4), ("tp", 8), ("gpus", 2 * gpus), ("gpus", 4 * gpus)]
    for change in halves + [dict(steps) for n in (1, 2, 3) for steps in combinations(ladder, n)]:
        batch = {} if "gpus" in change else {"batch_size": batch_size}  # as it is printed, but for other GPUs
        with suppress(ValueError):  # does not divide
            if predict(**batch, **change)["fits"]:
                return change


def show(config, found, change):
    """Print what `plan` has `found` for a launch of `config`, and the flags that make it fit."""
    told = "" if config.batch_size else " (assumed: tell train.py, too)"
    *_, inside, outside = GPUS[config.gpu]
    print(f"{config.gpus} x {config.gpu}, {config.machine} in a machine, --batch_size {found['batch_size']} "
          f"--micro_batch {found['micro_batch']}{told}\neach sends {inside} GB/s within its machine, {outside} GB/s to "
          "others (GPUS in distributed.py: edit it where yours differ)")
    print("gathered: 16-bit weights; block, root: gradients, and what backward recomputes; the peak is below the sum, "
          "for these do not all exist at once\ngradients are not sharded while micro-batches accumulate; each GPU "
          "computes all of Muon's update; what is sent meanwhile is hidden by computing")
    unit, scale = ("GB", 1e9) if found["memory"]["peak"] > 1e9 else ("MB", 1e6)
    for what, purposes, one in ((f"{unit} per GPU", found["memory"], scale), ("ms a step", found["spent"], 1e-3),
                                  (f"{unit} sent per GPU and step", found["sent"], scale)):
        for purpose, n in purposes.items():
            print(f"{purpose:14s} {n / one:9.3f} {what}")
    print(f"{'checkpoint':14s} {found['saved'] / scale:9.3f} {unit} on disk, for each that is kept or being written")
    print(f"{'step':14s} {1e3 * found['seconds']:9.3f} ms: {found['tokens_per_s']:,.0f} tokens/s, MFU "
          f"{found['mfu']:.0%}, if kernels reach {EFFICIENCY:.0%} of the peak")
    print("fits" if found["fits"] else f"does not fit; the smallest change that does: {change or 'none'}",
          f"(one {config.gpu} has {GPUS[config.gpu][0]} GB, of which 8 % are left to the allocator and NCCL)")


def main():
    """Print the plan of one launch: of train.py's run with these flags, in bf16, and with the ids of the preset."""
    import train
    from model import GPT, PRESETS, loss_chunks

    @dataclass
    class PlanConfig(train.TrainConfig):
        """Predict memory, traffic and speed of a launch, without a GPU: train.py's flags, and which GPUs."""
        batch_size: Annotated[int | None, "sequences per optimizer step; default: no accumulation"] = None
        gpus: Annotated[int, "GPUs in all", "the machines"] = 8
        machine: Annotated[int, "GPUs of one machine, which share fast links"] = 8
        gpu: Annotated[Literal[tuple(GPUS)], "which"] = "H100"

        def __post_init__(self):
            super().__post_init__()
            train.require(1 <= self.gpus <= 10 ** 4, f"--gpus is {self.gpus}, expected 1 to 10000")
            train.require(self.machine >= 1, f"--machine is {self.machine}, expected at least 1")
            train.require(self.dtype in ("auto", "bf16"), f"--dtype {self.dtype} is not predicted: bf16 is")
            train.require(not self.offload, "--offload is not predicted: what it costs depends on the host")
            train.require(self.attention != "reference", "--attention reference is not predicted: it keeps all scores")
            train.require(self.device in ("auto", "cuda"), f"--device {self.device} is not predicted: GPUs are")

    def predict(**change):
        now = replace(config, **change)
        fields = train.model_config(now, PRESETS[now.model or "nano"].get("vocab_size", 257))
        ranks = max(1, now.gpus // now.tp)  # that have data of their own
        now.batch_size = now.batch_size or ranks * (now.micro_batch or 1)
        micro_batch = train.pick_micro_batch(now, ranks)
        chunks = loss_chunks(micro_batch * fields.seq_len, fields.vocab_size, "cuda")
        build_optimizers = partial(train.build_optimizer, config=now, peak=1.0, dtype=torch.bfloat16)
        return dict(batch_size=now.batch_size, micro_batch=micro_batch, **plan(
            partial(GPT, fields), build_optimizers, now.gpus, now.fsdp, now.replicas, now.tp, micro_batch,
            fields.seq_len, now.reshard, now.activation_checkpoint, now.batch_size // ranks // micro_batch, now.gpu,
            chunks, now.machine, n_head=fields.n_head, n_kv_head=fields.n_kv_head, n_hidden=fields.n_hidden))
    with train.command(PlanConfig, "distributed.py") as config:
        try:
            found = predict()
            change = None if found["fits"] else smallest_change(
                predict, config.gpus, found["batch_size"], found["micro_batch"])
        except ValueError as error:  # flags that do not go together
            refuse(f"distributed.py: {error}", 2)
        except KeyError as error:
            refuse(f"distributed.py: {error} has no row in STATES (optimizers) or PLAN (products): add one", 2)
        show(config, found, change and train.spell(change))


if __name__ == "__main__":
    main()
