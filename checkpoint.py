"""What survives: weights, moments and step of a run on disk, through torch.distributed.checkpoint (DCP).

Every rank writes its own part, and any number of processes, DDP or sharded, reads it back, since keys are plain
parameter names. A checkpoint is complete or invisible: written under a temporary name, listed file by file, renamed.
Only tensors go through DCP, the rest is JSON, and DCP's one pickle is read through a list of classes: no code can run.

    python checkpoint.py inspect DIR     step, tokens, sizes, and every tensor's name, shape and dtype
    python checkpoint.py verify DIR      reads every byte against its checksum; exit code 1 names the broken file
"""
import json
import os
import pickle
import shutil
import sys
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist

# torch.distributed.checkpoint takes 1.5 s to import, so the functions that need it import it.

# ---- one key set: model and optimizers as one flat {name: tensor} ---------------------------------------------------

WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module"}  # of DDP, torch.compile, activation checkpointing


def parameter_names(model):
    """{parameter: its name without wrapper prefixes}: the same names whatever wraps the model."""
    return {parameter: ".".join(part for part in name.split(".") if part not in WRAPPERS)
            for name, parameter in model.named_parameters()}


def owners(model, optimizers):
    """{"optimizer.<class>.<name>": (optimizer, parameter group, parameter)}: whose state the optimizers keep."""
    names = parameter_names(model)
    return {f"optimizer.{type(optimizer).__name__}.{names[parameter]}": (optimizer, group, parameter)
            for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}


def tensors(model, optimizers=()):
    """{"model.<name>": parameter, "optimizer.<class>.<name>.<state>": moment}: a checkpoint's content, not copied.

    Not in it: learning rate and other hyperparameters, which the run derives from its step, and buffers.
    """
    state = {f"model.{name}": parameter.detach() for parameter, name in parameter_names(model).items()}
    for owner, (optimizer, _, parameter) in owners(model, optimizers).items():
        moments = optimizer.state.get(parameter, {})  # get: looking into it would make an entry
        state |= {f"{owner}.{field}": value for field, value in moments.items() if value is not None}
    if odd := [key for key, value in state.items() if not isinstance(value, torch.Tensor)]:
        raise ValueError(f"{odd[0]} is a {type(state[odd[0]]).__name__}, and a checkpoint holds tensors alone")
    return state


def empty(entry, group, parameter):
    """A tensor to load a piece of optimizer state into: laid out like its parameter, or a counter such as `step`."""
    if len(entry.size) == 0:  # torch's optimizers count on the CPU, unless they are to run without waiting for it
        device = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
        return torch.zeros((), dtype=entry.properties.dtype, device=device)
    return torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)


def compare(entries, targets):
    """ValueError, with names and both shapes, unless a checkpoint's entries are those of `targets`."""
    saved = {key: tuple(entry.size) for key, entry in entries.items()}
    wanted = {key: tuple(tensor.shape) for key, tensor in targets.items()}
    odd = sorted(key for key in saved.keys() | wanted.keys() if saved.get(key) != wanted.get(key))
    if odd:
        shown = [f"{key} is {saved.get(key, 'absent')} in it, {wanted.get(key, 'absent')} here" for key in odd[:4]]
        more = f", and {len(odd) - 4} more" if len(odd) > 4 else ""
        raise ValueError(f"the checkpoint is of another model or optimizer: {'; '.join(shown)}{more}")


def not_finite(model):
    """Name of the first parameter that holds a NaN or infinity in this rank's part, or None."""
    for parameter, name in parameter_names(model).items():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        # aminmax passes NaN and infinity on in one pass without a temporary: 10 times as fast as isfinite().all()
        if local.numel() and not torch.stack(torch.aminmax(local.detach())).isfinite().all():
            return name


# ---- files: listed with sizes and checksums, read without running anything ------------------------------------------

INDEX_CLASSES = {  # all that an index of tensors is made of; entries that are not tensors have another class
    "torch.distributed.checkpoint.metadata": {"Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties",
                                              "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float32", "float16", "bfloat16", "int64"},
}


class IndexUnpickler(pickle.Unpickler):
    """Reads DCP's index, a pickle, and refuses what is not of INDEX_CLASSES.

    Entries that are not tensors are refused too: DCP would give them to torch.load(weights_only=False).
    """

    def find_class(self, module, name):
        if name not in INDEX_CLASSES.get(module, ()):
            raise ValueError(f"it holds a {module}.{name}, which no tensor needs and which could run code")
        return super().find_class(module, name)


def read_index(folder):
    """DCP's index of a checkpoint folder: shape, dtype and place of each tensor. ValueError unless it is sound."""
    try:
        with open(folder / ".metadata", "rb") as stream:
            index = IndexUnpickler(stream).load()
        if foreign := {info.relative_path for info in index.storage_data.values()} - set(file_list(folder)):
            raise ValueError(f"it reads from {foreign.pop()}, which is not of this checkpoint")
    except (ValueError, TypeError, AttributeError, LookupError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder / '.metadata'} is refused: {error}") from None
    return index


def file_list(folder):
    """{file name: [bytes, checksum]} of a checkpoint folder, as written at its commit."""
    return json.loads((folder / "files.json").read_text())


def fingerprint(path):
    """[bytes, CRC-32] of a file. At 2.6 GB/s (SHA-256: 1.4) it guards against decay, not against forgery."""
    size = crc = 0
    with open(path, "rb") as stream:
        while block := stream.read(1 << 22):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def broken(folder, read=None):
    """What is wrong with a checkpoint folder, beginning with a file's name, or None when it is complete.

    Looks at names and sizes; with read=(rank, ranks) also at the checksums of this rank's share of the files.
    """
    name = "files.json"
    if not folder.is_dir():
        return "there is no such checkpoint"
    try:
        for number, (name, (size, crc)) in enumerate(file_list(folder).items()):
            if os.path.basename(name) != name:
                return f"{name} is a path out of the folder"
            if (found := (folder / name).stat().st_size) != size:
                return f"{name} has {found:,} bytes where {size:,} were written"
            if read and number % read[1] == read[0] and fingerprint(folder / name) != [size, crc]:
                return f"{name} is not what was written: its checksum differs"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{name} cannot be read: {error}"


def flush(path):
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def storage_writer(folder, commit):
    """A DCP writer into `folder` whose last act, on rank 0 when all ranks have written, is commit({file: fingerprint}).

    A part of DCP's own protocol, so it serves dcp.save and dcp.async_save, and every rank learns of a failure on any.
    """
    from torch.distributed.checkpoint import FileSystemWriter

    class Writer(FileSystemWriter):
        def storage_meta(self):
            return None  # it would keep the path of the temporary folder

        def write_data(self, plan, planner):
            try:
                written = super().write_data(plan, planner)
            except (OSError, RuntimeError) as error:  # torch.save makes a RuntimeError of a full disk
                raise OSError(f"{folder}/__{self.rank}_*.distcp: {error.__context__ or error}") from None
            names = {item.storage_data.relative_path for item in written.value()}
            return written.then(lambda _: (written.value(), {name: fingerprint(folder / name) for name in names}))

        def finish(self, metadata, results):
            super().finish(metadata, [written for written, _ in results])
            commit({name: entry for _, files in results for name, entry in files.items()})

    return Writer(folder)


def reason(error):
    """One line of DCP's exception, which holds one for each rank that failed; Ctrl-C among them goes on its way."""
    for rank, (cause, _) in getattr(error, "failures", {}).items():
        if not isinstance(cause, Exception):
            raise cause
        return f"{reason(cause)} (rank {rank})"
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in lines if "GLOBAL" in line), lines[0])  # torch.load's line on the class it refuses


# ---- save and load --------------------------------------------------------------------------------------------------


class Checkpointer:
    """Saves to and loads from `out`/checkpoints/step_00000100. Made and called by all ranks together, but for steps().

    keep: how many of the newest stay; keep_every: and all whose step it divides. asynchronous: save() returns once the
    tensors are copied, and a thread writes them. Process groups, if any, are initialized before.
    """

    def __init__(self, out, keep=2, asynchronous=False, keep_every=0):
        self.root, self.keep, self.keep_every = Path(out, "checkpoints"), keep, keep_every
        # A group of its own: on the default one the writing thread's messages mix with the training step's and hang.
        self.group = dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if self.group else (0, 1)
        self.asynchronous, self.verified, self.saved = asynchronous, None, None
        self.pending = self.failure = self.stager = None
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP on one process, as intended

    def folder(self, step):
        """Where the checkpoint of `step` is, or would be."""
        return self.root / f"step_{step:08d}"

    def numbers(self):
        """Steps of all checkpoint folders, complete or not, ascending."""
        return sorted(int(path.name[5:]) for path in self.root.glob("step_*") if path.name[5:].isdecimal())

    def steps(self):
        """Steps of the complete checkpoints, ascending."""
        return [step for step in self.numbers() if not broken(self.folder(step))]

    def agree(self, value):
        """The first of the ranks' values that is not empty, else None; ranks agree before any of them acts."""
        values = [value] * self.ranks
        if self.group:
            dist.all_gather_object(values, value, group=self.group)
        return next(filter(None, values), None)

    def save(self, step, model, optimizers=(), extra=None):
        """Write the state of `step`: tensors through DCP, and `extra`, a dict that JSON can hold, beside them.

        Skips the step saved or loaded last. ValueError if a parameter is not finite; OSError, on all ranks, if the
        write fails (at once, or if asynchronous from check() and finish()). Older checkpoints are then as they were.
        """
        import torch.distributed.checkpoint as dcp

        self.settle()  # one write at a time
        if step == self.saved:
            return
        self.sweep()  # what a killed run left; nobody passes the agreement below before it is gone
        if odd := self.agree(not_finite(model)):
            raise ValueError(f"step {step} is not saved: parameter {odd} holds a NaN or infinity")
        note = json.dumps({"step": step, "extra": extra or {}})  # now, since the caller may change `extra` later
        temporary = self.root / f".tmp-step_{step:08d}"
        writer = storage_writer(temporary, lambda files: self.commit(step, note, files, temporary))
        state, where = tensors(model, optimizers), dict(storage_writer=writer, process_group=self.group)
        self.saved = step
        if self.asynchronous:
            self.pending = dcp.async_save(state, async_stager=self.staging(state), **where)
        else:
            self.settle(lambda: dcp.save(state, **where))
            self.finish()

    def staging(self, state):
        """Memory to copy `state` to, kept from save to save: new pages would cost most of the time that one stalls."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        if self.stager is None or self.stager.state_dict_cache.keys() != state.keys():
            self.stager = BlockingAsyncStager(cache_staged_state_dict=True)
            if not torch.cuda.is_available():  # its own would be pinned memory, which only a GPU's driver has
                self.stager.state_dict_cache = BlockingAsyncStager().stage(state)
        return self.stager

    def commit(self, step, note, files, temporary):
        """Make a written checkpoint visible, then remove others. Runs on rank 0, when the ranks' parts are on disk."""
        (temporary / "state.json").write_text(note)
        files |= {name: fingerprint(temporary / name) for name in (".metadata", "state.json")}
        (temporary / "files.json").write_text(json.dumps(files))
        for path in (temporary / "state.json", temporary / "files.json", temporary):
            flush(path)
        if self.folder(step).exists():  # damaged, or of a run since resumed from further back
            self.folder(step).rename(self.root / f".tmp-replaced-{step}")
        temporary.rename(self.folder(step))
        flush(self.root)
        self.prune(step)

    def prune(self, step):
        """Keep the newest up to `step` and the milestones; later ones belong to a run resumed from further back."""
        if later := [number for number in self.numbers() if number > step]:
            print(f"checkpoint {step} is now the newest; removed the later ones of the run before: {later}", flush=True)
        kept = [number for number in self.steps() if number <= step]
        milestones = [number for number in kept if self.keep_every and number % self.keep_every == 0]
        for number in set(self.numbers()) - set(kept[-self.keep:] + milestones):
            shutil.rmtree(self.folder(number), ignore_errors=True)  # cut short, it leaves what is not complete
        self.sweep()

    def sweep(self):
        """Remove temporary folders."""
        for path in self.root.glob(".tmp-*") if self.rank == 0 else ():
            shutil.rmtree(path, ignore_errors=True)

    def settle(self, write=None):
        """Do `write`, or wait for the one under way; its failure waits for finish(): ranks must not part here."""
        from torch.distributed.checkpoint import CheckpointException

        pending, self.pending = self.pending, None
        try:
            if write or pending:
                (write or pending.result)()
        except (CheckpointException, OSError, RuntimeError) as error:
            self.failure = OSError(f"checkpoint {self.saved} is not written: {reason(error)}")
            self.saved = None
            self.sweep()

    def check(self):
        """Raise the OSError of an asynchronous write that has failed by now, on each rank when it learns of it."""
        if self.pending is None or self.pending.done():
            self.finish()

    def finish(self):
        """Wait for an asynchronous write; OSError if it failed, or one that nobody has been told of."""
        if self.pending:
            self.settle()
        failure, self.failure = self.failure, None
        if failure:
            raise failure

    def choose(self, step=None, read=None):
        """The step to load, the same on all ranks: `step`, or the newest complete one; None if there is no folder.

        With read=(rank, ranks) each rank compares the checksums of its share of the files.
        """
        problems = []
        for number in self.agree([step] if step is not None else self.numbers()[::-1]) or ():
            problem = self.agree(broken(self.folder(number), read))
            if problem is None:
                if problems and self.rank == 0:
                    print(f"skipped {'; '.join(problems)}", flush=True)
                self.verified = number if read else self.verified
                return number
            problems.append(f"checkpoint {number}: {problem}")
        if problems:
            raise ValueError(f"{self.root}: {'; '.join(problems)}. Complete are: {self.steps() or 'none'}")

    def load(self, model, optimizers=(), step=None):
        """Fill model and optimizers from `step`, or from the newest complete checkpoint -> (step, extra).

        None if there is no checkpoint. ValueError if `step`, or each there is, is damaged, or of another model or
        optimizer: then nothing has been modified. Without optimizers, the model alone is loaded.
        """
        import torch.distributed.checkpoint as dcp

        if step is None or step != self.verified:
            step = self.choose(step, read=(self.rank, self.ranks))
        if step is None:
            return None
        index, state_of = read_index(self.folder(step)), owners(model, optimizers)
        wanted = ("model.", "optimizer.") if optimizers else "model."
        entries = {key: entry for key, entry in index.state_dict_metadata.items() if key.startswith(wanted)}
        # A fresh optimizer has no state to load into. Made here, as torch's own way to make it (a step on gradients of
        # zero) does nothing, silently, when there are gradients already.
        moments = {key: empty(entry, *state_of[owner][1:]) for key, entry in entries.items()
                   if (owner := key.rpartition(".")[0]) in state_of}
        targets = tensors(model) | moments
        compare(entries, targets)
        reader = dcp.FileSystemReader(self.folder(step))
        reader.read_metadata = lambda *args, **kwargs: index  # its own would unpickle anything
        try:
            dcp.load(targets, storage_reader=reader, process_group=self.group)
        except dcp.CheckpointException as error:
            raise ValueError(f"{self.folder(step)} cannot be loaded: {reason(error)}") from None
        for optimizer in optimizers:
            optimizer.state.clear()
        for key, value in moments.items():
            owner, _, field = key.rpartition(".")
            optimizer, _, parameter = state_of[owner]
            optimizer.state[parameter][field] = value
        self.saved = step
        return step, self.read_extra(step)

    def read_extra(self, step=None):
        """`extra` of a checkpoint, None if there is none: what the model can be built from before load() fills it."""
        step = self.choose(step)
        return None if step is None else json.loads((self.folder(step) / "state.json").read_text())["extra"]


# ---- python checkpoint.py -------------------------------------------------------------------------------------------


@dataclass
class CheckpointConfig:
    """Look into the checkpoints of a run."""

    command: Annotated[Literal["inspect", "verify"], "show the newest's content, or read every byte of all of them"]
    folder: Annotated[str, "folder of a run, or one step_* folder"]


def folders(path):
    """The checkpoint folders that `path` means, ascending: itself, or a run's. ValueError if there are none."""
    path = Path(path).resolve()
    run = sorted([*path.glob("step_*"), *path.glob("checkpoints/step_*")])
    found = [path] if path.name.startswith("step_") and path.is_dir() else run
    if not found:
        raise ValueError(f"no checkpoints in {path}: expected the folder of a run, or one step_* folder of it")
    return found


def inspect(path):
    """Print what the newest complete checkpoint holds, without reading a tensor."""
    folder = next((folder for folder in reversed(folders(path)) if not broken(folder)), None)
    if folder is None:
        raise ValueError(f"no checkpoint in {path} is complete: see python checkpoint.py verify {path}")
    print(f"{folder}: {sum(size for size, _ in file_list(folder).values()) / 1e6:,.1f} MB")
    for key, value in json.loads((folder / "state.json").read_text()).items():
        print(f"{key}: {json.dumps(value)}")
    for key, entry in sorted(read_index(folder).state_dict_metadata.items()):
        print(f"{key:60s} {tuple(entry.size)!s:18s} {str(entry.properties.dtype)[6:]}")


def verify(path):
    """Read every byte of every checkpoint against its checksum; ValueError names the broken files."""
    problems = {folder: broken(folder, read=(0, 1)) for folder in folders(path)}
    for folder, problem in problems.items():
        print(f"{folder}: {problem or 'as it was written'}")
    if bad := [f"{folder.name}: {problem}" for folder, problem in problems.items() if problem]:
        raise ValueError("; ".join(bad))


def main():
    from train import parse_args

    config = parse_args(CheckpointConfig, "checkpoint.py")
    try:
        {"inspect": inspect, "verify": verify}[config.command](config.folder)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"checkpoint.py: {error}")


if __name__ == "__main__":
    main()
