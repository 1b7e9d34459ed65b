"""What survives: weights, moments and step of a run on disk, through torch.distributed.checkpoint (DCP).

Every rank writes its own part, and any number of processes, DDP or sharded, reads it back, since keys are plain
parameter names. A checkpoint is complete or invisible: written under a temporary name, listed file by file, renamed.
Only tensors go through DCP, the rest is JSON, and DCP's one pickle is read through a list of classes: no code can run.

    python checkpoint.py inspect DIR     step, tokens, sizes, and every tensor's name, shape and dtype
    python checkpoint.py verify DIR      reads every byte against its checksum; exit code 1 names the broken file
    python checkpoint.py export DIR OUT  a folder in Hugging Face's form, which transformers loads
    python checkpoint.py import DIR OUT  the reverse: such a folder, or nanoGPT's ckpt.pt, as a run
"""
import contextlib
import enum
import json
import os
import pickle
import re
import shlex
import shutil
import sys
import warnings
import zipfile
import zlib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

# torch.distributed.checkpoint takes 1.5 s to import, so the functions that need it import it.

# ---- one key set: model and optimizers as one flat {name: tensor} ---------------------------------------------------

WRAPPERS = r"\b(module|_orig_mod|_checkpoint_wrapped_module)\."  # of DDP, torch.compile, activation checkpointing


def parameters(model):
    """{name without wrapper prefixes: parameter}: the same names whatever wraps the model."""
    return {re.sub(WRAPPERS, "", name): parameter for name, parameter in model.named_parameters()}


def owners(model, optimizers):
    """{"optimizer.<class>.<name>": (optimizer, parameter group, parameter)}: whose state the optimizers keep."""
    names = {parameter: name for name, parameter in parameters(model).items()}
    return {f"optimizer.{type(optimizer).__name__}.{names[parameter]}": (optimizer, group, parameter)
            for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}


def tensors(model, optimizers=()):
    """{"model.<name>": parameter, "optimizer.<class>.<name>.<state>": moment}: a checkpoint's content, not copied.

    Not in it: learning rate and other hyperparameters, which the run derives from its step. ValueError for a moment
    that `load` could not bring back.
    """
    state_of = owners(model, optimizers)
    # get: looking into an optimizer's state would make an entry.
    moments = {f"{owner}.{field}": value for owner, (optimizer, _, parameter) in state_of.items()
               for field, value in optimizer.state.get(parameter, {}).items() if value is not None}
    for key, value in moments.items():
        like = state_of[key.rpartition(".")[0]][2]
        if not (torch.is_tensor(value) and value.shape in (like.shape, ()) and str(value.dtype)[6:] in DTYPES):
            raise ValueError(f"{key} is no tensor of its parameter's shape or of none, in {DTYPES}: nothing loads it")
    return {f"model.{name}": parameter.detach() for name, parameter in parameters(model).items()} | moments


def empty(entry, group, parameter):
    """A tensor to load a piece of optimizer state into: laid out like its parameter, or a counter such as `step`."""
    if len(entry.size) == 0:  # torch's optimizers count on the CPU, unless they are to run without waiting for it
        device = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
        return torch.zeros((), dtype=entry.properties.dtype, device=device)
    return torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)


def compare(saved, wanted, problem="the checkpoint is of another model or optimizer"):
    """ValueError, with names and both forms, unless what is `saved`, {name: shape or more}, is what is `wanted`."""
    if odd := sorted(key for key in saved.keys() | wanted.keys() if saved.get(key) != wanted.get(key)):
        shown = [f"{key} is {saved.get(key, 'absent')} in it, {wanted.get(key, 'absent')} here" for key in odd[:4]]
        more = f", and {len(odd) - 4} more" if len(odd) > 4 else ""
        raise ValueError(f"{problem}: {'; '.join(shown)}{more}")


def not_finite(model):
    """Name of the first parameter that holds a NaN or infinity in this rank's part, or None."""
    for name, parameter in parameters(model).items():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        # aminmax passes NaN and infinity on in one pass without a temporary: 10 times as fast as isfinite().all()
        if local.numel() and not torch.stack(torch.aminmax(local.detach())).isfinite().all():
            return name


# ---- files: listed with sizes and checksums, read without running anything ------------------------------------------

DTYPES = {"float32", "float16", "bfloat16", "int64"}
INDEX_CLASSES = {  # all that an index of tensors is made of; entries that are not tensors have another class
    "torch.distributed.checkpoint.metadata": {"Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties",
                                              "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *DTYPES}}


def member(kind, name):
    """A member of an enumeration: what Python 3.11.0 to 3.11.3 store as builtins.getattr, which could do much more."""
    if not issubclass(kind, enum.Enum):
        raise ValueError(f"it asks for {name} of {kind.__name__}, which is no enumeration")
    return kind[name]


class IndexUnpickler(pickle.Unpickler):
    """Reads DCP's index, a pickle, and refuses what is not of INDEX_CLASSES.

    Entries that are not tensors are refused too: DCP would give them to torch.load(weights_only=False).
    """

    def find_class(self, module, name):
        if (module, name) == ("builtins", "getattr"):
            return member
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
    crc = 0
    with open(path, "rb") as stream:  # in pieces: a shard of a large model is larger than memory
        while block := stream.read(1 << 22):
            crc = zlib.crc32(block, crc)
        return [stream.tell(), crc]


def broken(folder, read=None):
    """What is wrong with a checkpoint folder, beginning with a file's name, or None when it is complete.

    Looks at names and sizes; with read=(rank, ranks) also at the checksums of this rank's share of the files.
    """
    name = "files.json"
    try:
        if not {".metadata", "state.json"} <= (listed := file_list(folder)).keys():
            return f"{name} is not of a whole checkpoint"
        for number, (name, (size, crc)) in enumerate(listed.items()):
            if os.path.basename(name) != name:
                return f"{name} is a path out of the folder"
            if (found := (folder / name).stat().st_size) != size:
                return f"{name} has {found:,} bytes where {size:,} were written"
            if read and number % read[1] == read[0] and fingerprint(folder / name) != [size, crc]:
                return f"{name} is not what was written: its checksum differs"
    except FileNotFoundError:
        return f"{name} is missing" if folder.exists() else "there is no such checkpoint"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{name} cannot be read: {error}"


def flush(path):
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    if os.name != "nt":  # which does so neither with folders nor with what is open to be read
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
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
            except (OSError, RuntimeError) as error:
                while error.__context__:  # torch.save makes a RuntimeError of a full disk
                    error = error.__context__
                raise OSError(f"{folder}/__{self.rank}_*.distcp: {error}") from None
            names = {item.storage_data.relative_path for item in written.value()}
            return written.then(lambda _: (written.value(), {name: fingerprint(folder / name) for name in names}))

        def finish(self, metadata, results):
            super().finish(metadata, [written for written, _ in results])
            commit({name: entry for _, files in results for name, entry in files.items()})

    return Writer(folder)


def tell(*words, **options):
    """Print at once. When that cannot be, as after `| head` or on a full disk, work goes on without."""
    try:
        print(*words, flush=True, **options)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
        self.root, self.keep, self.keep_every = Path(os.path.realpath(out), "checkpoints"), keep, keep_every
        # A group of its own: on the default one the writing thread's messages mix with the training step's and hang.
        self.group = dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if self.group else (0, 1)
        # Steps: `verified`, whose checksums this process has compared; `damaged`, which differ from theirs; `saved`,
        # written, loaded, or being written.
        self.asynchronous, self.verified, self.damaged, self.saved = asynchronous, None, set(), None
        # `pending` is the write under way, `failure` what finish() will raise of it. `stager` has the memory that an
        # asynchronous save copies to, `reserved` the names of the tensors for which it was made.
        self.pending = self.failure = self.stager = self.reserved = None
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP on one process, as intended

    def folder(self, step):
        """Where the checkpoint of `step` is, or would be."""
        return self.root / f"step_{step:08d}"

    def numbers(self):
        """Steps of all checkpoint folders, complete or not, ascending."""
        return sorted(int(path.name[5:]) for path in self.root.glob("step_*") if path.name[5:].isdecimal())

    def steps(self):
        """Steps of the complete checkpoints, ascending."""
        return [step for step in self.numbers() if step not in self.damaged and not broken(self.folder(step))]

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
        # Not copied: DCP reads the shards where they are, each process its own; of what all have, one writes it.
        state, where = tensors(model, optimizers), dict(storage_writer=writer, process_group=self.group)
        self.saved = step  # unless it fails: settle() takes that back
        self.damaged.discard(step)
        if self.asynchronous:
            self.reserve(state)
            self.pending = dcp.async_save(state, async_stager=self.stager.result(), **where)
        else:
            self.settle(lambda: dcp.save(state, **where))
            self.finish()

    def reserve(self, state):
        """Get memory to copy `state` to, in a thread, and keep it: new pages are most of what a save stalls for."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        def stage():
            stager = BlockingAsyncStager(cache_staged_state_dict=True)
            # Its own would be pinned memory, which only a GPU's driver has.
            stager.state_dict_cache = None if torch.cuda.is_available() else BlockingAsyncStager().stage(state)
            stager.stage(state)
            return stager
        if self.reserved != state.keys():
            self.reserved, self.stager = state.keys(), ThreadPoolExecutor(1).submit(stage)

    def commit(self, step, note, files, temporary):
        """Make a written checkpoint visible, then remove others. Runs on rank 0, when the ranks' parts are on disk."""
        (temporary / "state.json").write_text(note)
        files |= {name: fingerprint(temporary / name) for name in (".metadata", "state.json")}
        (temporary / "files.json").write_text(json.dumps(files))  # last: what it does not list is not complete
        if problem := broken(temporary):  # of another process
            raise OSError(f"{problem} in {self.root}: is --out one folder for all machines?")
        # On the disk before the name is: a rename that overtook its content would be a complete checkpoint of zeros.
        # (DCP has flushed its own files.)
        for path in (temporary / "state.json", temporary / "files.json", temporary):
            flush(path)
        if self.folder(step).exists():  # damaged, or of a run since resumed from further back
            self.folder(step).rename(self.root / f".tmp-replaced-{step}")
        temporary.rename(self.folder(step))
        flush(self.root)
        self.prune(step)
        if self.asynchronous:  # else its caller knows
            tell(f"step {step}  checkpoint complete")

    def prune(self, step):
        """Keep the newest up to `step` and the milestones; later ones belong to a run resumed from further back."""
        if later := [number for number in self.numbers() if number > step]:
            tell(f"checkpoint {step} is now the newest; removed the later ones of the run before: {later}")
        kept = [number for number in self.steps() if number <= step]
        milestones = [number for number in kept if self.keep_every and number % self.keep_every == 0]
        gone = sorted(set(self.numbers()) - set(kept[-self.keep:] + milestones))
        if set(gone) - set(later) - set(kept[-self.keep - 1:-self.keep]):  # more than what goes at each save
            tell(f"--keep {self.keep} --keep_every {self.keep_every}: removed the checkpoints {gone}")
        for number in gone:
            shutil.rmtree(self.folder(number), ignore_errors=True)  # cut short, it leaves what is not complete
        self.sweep()

    def sweep(self):
        """Remove temporary folders. Never fails: rank 0 alone would miss what the ranks do next together."""
        with contextlib.suppress(OSError):
            for path in self.root.glob(".tmp-*") if self.rank == 0 else ():
                shutil.rmtree(path, ignore_errors=True)

    def settle(self, write=None):
        """Do `write`, or wait for the one under way; its failure waits for finish(): ranks must not part here."""
        from torch.distributed.checkpoint import CheckpointException

        pending, self.pending = self.pending, None
        try:
            if write or pending:
                (write or pending.result)()
        except (CheckpointException, OSError, RuntimeError) as error:  # RuntimeError: gloo's, when a rank is gone
            self.failure = OSError(f"checkpoint {self.saved} is not written: {reason(error)}")
            self.saved = None
            self.sweep()

    def check(self, model, optimizers=()):
        """Raise the OSError of an asynchronous write that has failed by now, on each rank when it learns of it.

        After the first optimizer step it begins to get the memory that asynchronous saves will need.
        """
        if self.asynchronous and self.reserved is None:
            self.reserved = ()  # tried, whatever comes of it
            self.reserve(tensors(model, optimizers))
        self.finish(blocking=False)

    def finish(self, blocking=True):
        """Wait for an asynchronous write, unless not `blocking`; OSError for one that failed, told once."""
        if blocking and self.stager:
            wait([self.stager])  # a thread that still reads the model would outlive the process group
        if self.pending and (blocking or self.pending.done()):
            self.settle()
        failure, self.failure = self.failure, None
        if failure:
            raise failure

    def choose(self, step=None, read=False):
        """The step to load, the same on all ranks: `step`, or the newest complete one; None if there is no folder.

        With `read` each rank compares the checksums of its share of the files.
        """
        problems = {}
        # One list for all: a network file system may show another one to each machine.
        for number in self.agree([step] if step is not None else self.numbers()[::-1]) or ():
            share = (self.rank, self.ranks) if read and number != self.verified else None
            problem = self.agree(broken(self.folder(number), share))
            if problem is None:
                if problems and self.rank == 0:
                    tell(f"skipped {'; '.join(problems.values())}")
                if read:
                    self.verified = number
                    self.damaged.discard(number)
                return number
            problems[number] = f"checkpoint {number}: {problem}"
            self.damaged.add(number)
        if problems:
            complete = [number for number in self.steps() if number not in problems]
            raise ValueError(f"{self.root}: {'; '.join(problems.values())}. Complete are: {complete or 'none'}"
                             + " (--resume auto takes the newest)" * bool(complete))

    def load(self, model, optimizers=(), step=None):
        """Fill model and optimizers from `step`, or from the newest complete checkpoint -> (step, extra).

        None if there is no checkpoint. ValueError if `step`, or each there is, is damaged, or of another model or
        optimizer: then nothing has been modified. Without optimizers, the model alone is loaded.
        """
        import torch.distributed.checkpoint as dcp

        if (step := self.choose(step, read=True)) is None:
            return None
        index, state_of = read_index(self.folder(step)), owners(model, optimizers)
        wanted = ("model.", "optimizer.") if optimizers else "model."
        entries = {key: entry for key, entry in index.state_dict_metadata.items() if key.startswith(wanted)}
        # A fresh optimizer has no state to load into. Made here, as torch's own way to make it (a step on gradients of
        # zero) does nothing, silently, when there are gradients already.
        targets, states = tensors(model), {optimizer: defaultdict(dict) for optimizer in optimizers}
        for key, entry in entries.items():
            owner, _, field = key.rpartition(".")
            if owner in state_of:
                optimizer, group, parameter = state_of[owner]
                targets[key] = states[optimizer][parameter][field] = empty(entry, group, parameter)
        compare({key: f"{tuple(entry.size)} {entry.properties.dtype}" for key, entry in entries.items()},
                {key: f"{tuple(tensor.shape)} {tensor.dtype}" for key, tensor in targets.items()})
        reader = dcp.FileSystemReader(self.folder(step))
        reader.read_metadata = lambda *args, **kwargs: index  # its own would unpickle anything
        try:
            dcp.load(targets, storage_reader=reader, process_group=self.group)
        except dcp.CheckpointException as error:
            raise ValueError(f"{self.folder(step)} cannot be loaded: {reason(error)}") from None
        # Only now, when all has been read: until here a failure leaves the optimizers as they were.
        for optimizer, state in states.items():
            optimizer.state = state
        self.saved = step
        return step, self.read_extra(step)

    def read_extra(self, step=None):
        """`extra` of a checkpoint, None if there is none: what the model can be built from before load() fills it."""
        step = self.choose(step)
        return None if step is None else json.loads((self.folder(step) / "state.json").read_text())["extra"]


# ---- Hugging Face's form --------------------------------------------------------------------------------------------
# A row for each model_type. names: ours -> theirs; ours that share one are stacked in it, in this order. fields: of
# config.json -> of ModelConfig. fixed: what the class has beside them, and what an absent field means.

LLAMA = {
    "class": "LlamaForCausalLM",
    "fixed": dict(norm="rmsnorm", position="rope", mlp="swiglu", bias=False, qk_norm=False, norm_eps=1e-6),
    "fields": dict(
        vocab_size="vocab_size", max_position_embeddings="seq_len", num_hidden_layers="n_layer", hidden_size="n_embd",
        num_attention_heads="n_head", num_key_value_heads="n_kv_head", head_dim="head_dim", rms_norm_eps="norm_eps",
        intermediate_size="n_hidden", tie_word_embeddings="tied", rope_theta="rope_theta", rope_scaling="rope_scaling"),
    "names": {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "blocks": "model.layers",
              "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "attn.q": "self_attn.q_proj",
              "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj",
              "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm", "mlp.gate": "mlp.gate_proj",
              "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"}}
QWEN3 = LLAMA | {"class": "Qwen3ForCausalLM", "fixed": LLAMA["fixed"] | {"qk_norm": True}}
GPT2 = {
    "class": "GPT2LMHeadModel",
    "fixed": dict(norm="layernorm", position="learned", mlp="gelu", bias=True, qk_norm=False, norm_eps=1e-5, tied=True),
    "fields": dict(vocab_size="vocab_size", n_positions="seq_len", n_layer="n_layer", n_head="n_head", n_embd="n_embd",
                   n_inner="n_hidden", layer_norm_epsilon="norm_eps", tie_word_embeddings="tied", embd_pdrop="dropout",
                   resid_pdrop="dropout"),
    "names": {"embed": "transformer.wte", "position": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head",
              "blocks": "transformer.h", "attn_norm": "ln_1", "mlp_norm": "ln_2", "attn.q": "attn.c_attn",
              "attn.k": "attn.c_attn", "attn.v": "attn.c_attn", "attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc",
              "mlp.down": "mlp.c_proj"}}
NANOGPT = GPT2 | {  # the "model_args" of its ckpt.pt; the GELU is the exact one there since June 2023
    "fixed": GPT2["fixed"] | {"mlp": "gelu_exact"},
    "fields": dict(vocab_size="vocab_size", block_size="seq_len", n_layer="n_layer", n_head="n_head", n_embd="n_embd",
                   dropout="dropout", bias="bias")}
FAMILIES = {"gpt2": GPT2, "llama": LLAMA, "qwen3": QWEN3, "nanoGPT's ckpt.pt": NANOGPT}
EXPECTED = {  # config.json's other fields -> what they may say, both regular expressions
    "activation_function": "gelu|gelu_new|gelu_pytorch_tanh", "hidden_act": "silu|swish", "scale_attn_weights": "True",
    "layer_types": r"\[('full_attention'(, )?)*\]", "pretraining_tp": "1", "partial_rotary_factor": r"1(\.0)?",
    # Anything: of training, of generating, of other heads, of windows that are off.
    "_name_or_path|architectures|attention_dropout|attn_pdrop|chunk_size_feed_forward|(torch_)?dtype|initializer_range|"
    "id2label|is_llama_config|label2id|max_window_layers|model_type|n_ctx|return_dict|sliding_window|summary_.*|"
    "use_cache|task_specific_params|transformers.*|.*_token_id": "(?s).*",
    ".*": "None|False"}  # all others must be off


@contextlib.contextmanager
def new_folder(path):
    """Context: a folder to fill, which must be empty if it is there; when filling it fails, nothing is left."""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise ValueError(f"{path} is not empty: take another folder")
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, path, ignore_errors=True)
        yield path
        undo.pop_all()


def hf_config(fields):
    """config.json of the class that is a GPT of `fields`; ValueError names the field that no class of theirs has."""
    kind = "gpt2" if fields["position"] == "learned" else "qwen3" if fields["qk_norm"] else "llama"
    family = FAMILIES[kind]
    # No part of the weights' meaning: dropout; document masks and what restarts with them (what is continued is one
    # document); RoPE in GPT-2.
    free = {"dropout", "doc_start", "restart_positions", "rope_theta", "rope_scaling", *family["fields"].values()}
    has = {"n_kv_head": fields["n_head"], "head_dim": fields["n_embd"] / fields["n_head"], **family["fixed"]}
    # GPT-2's class has both forms of the GELU.
    for name, value in (fields | {"mlp": fields["mlp"].removesuffix("_exact")}).items():
        if name not in free and (value or 0) != has.get(name, 0):
            raise ValueError(f"{name} is {value!r}, and {family['class']} has {has.get(name, 'none')!r}: "
                             "transformers has no class for this model")
    config = {theirs: fields[ours] for theirs, ours in family["fields"].items()}
    if kind == "gpt2":
        config |= dict(activation_function="gelu" if fields["mlp"] == "gelu_exact" else "gelu_new", attn_pdrop=0.0)
    if scaling := config.get("rope_scaling"):  # transformers warns of a context too short to need it
        config["max_position_embeddings"] = max(fields["seq_len"], scaling["original_max_position_embeddings"] + 1)
    return config | {"model_type": kind, "architectures": [family["class"]]}


def rope_fields(config):
    """rope_theta and rope_scaling of a config.json, where transformers 5 has both in rope_parameters."""
    # transformers 4 had rope_theta beside rope_scaling, and its kind under "type" at first
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", config.get("rope_theta"))
    named = [rope.pop(name, None) for name in ("rope_type", "type")]  # some files have both
    kind = named[0] or named[1] or "default"
    known = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    numbers = all(type(n) in (int, float) and n > 0 for n in rope.values())
    if not numbers or (kind, rope.keys()) not in (("default", set()), ("llama3", known)):
        raise ValueError(f"rope_type is {kind!r} with {rope}; known: default with none, llama3 with positive {known}")
    return dict(rope_theta=theta, rope_scaling=dict(rope_type=kind, **rope) if rope else None, rope_parameters=None)


def model_fields(config):
    """ModelConfig's fields of a config.json. ValueError names a field that is not known here, with its value.

    Such a field may change what the weights mean without changing their shapes: never loaded as if it were not there.
    """
    if (family := FAMILIES.get(config.get("model_type"))) is None:
        raise ValueError(f"model_type is {config.get('model_type')!r}; known are {', '.join(FAMILIES)}")
    config = config | rope_fields(config)
    for name, value in config.items():
        expected = next(values for names, values in EXPECTED.items() if re.fullmatch(names, name))
        if name not in family["fields"] and not re.fullmatch(expected, str(value)):
            raise ValueError(f"{name} is {value!r}, expected {expected}: a GPT of model.py has nothing else")
    found = {ours: config[theirs] for theirs, ours in family["fields"].items() if config.get(theirs) is not None}
    if config.get("activation_function") == "gelu":
        found["mlp"] = "gelu_exact"
    # All others are counts.
    kinds = dict(mlp=str, norm_eps=float, rope_theta=float, dropout=float, tied=bool, bias=bool, rope_scaling=dict)
    for ours, value in found.items():
        kind = kinds.get(ours, int)
        if type(value) not in ((int, float) if kind is float else (kind,)) or kind is int and value < 1:
            raise ValueError(f"{ours} is {value!r}, expected {'a positive int' if kind is int else kind.__name__}")
        found[ours] = kind(value)
    if missing := {"vocab_size", "seq_len", "n_layer", "n_head", "n_embd"} - found.keys():
        raise ValueError(f"it says nothing of {', '.join(missing)}")
    return family["fixed"] | found


def hf_names(kind, names):
    """{their name: [ours that are stacked in it]} of parameter names such as blocks.0.attn.q.weight."""
    table, found = FAMILIES[kind]["names"], {}
    for name in names:
        # blocks.0.attn.q.weight: "blocks", ".0", "attn.q" and ".weight"; embed.weight has the last two.
        match = re.fullmatch(r"(?:(blocks)(\.\d+)\.)?(.+)(\.weight|\.bias)", name)
        if not match or match[3] not in table:
            raise ValueError(f"{FAMILIES[kind]['class']} has no {name}: transformers has no class for this model")
        block, layer, part, end = match.groups()
        theirs = f"{table[block]}{layer}.{table[part]}{end}" if block else table[part] + end
        found.setdefault(theirs, []).append(name)
    return found


def conv1d(kind, name, tensor):
    """To or from the (in, out) matrices of GPT-2's blocks, where all others are (out, in); not a copy.

    OpenAI's Conv1D computes x W + b, nn.Linear x W^T + b.
    """
    return tensor.T if kind == "gpt2" and ".h." in name and tensor.ndim == 2 else tensor


def read_hf(path):
    """(model_type, ModelConfig's fields, {their name: tensor}) of a Hugging Face folder, or of nanoGPT's ckpt.pt.

    The tensors are mapped into memory: they are read, and cost memory, when they are copied from. ValueError names the
    file.
    """
    path = file = Path(path)
    try:
        if path.is_file():
            if not zipfile.is_zipfile(path):
                raise ValueError("it is no file of torch.save")
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            kind, found = "nanoGPT's ckpt.pt", dict(saved["model"])
            fields = model_fields({**saved["model_args"], "model_type": kind})
        else:
            file = path / "config.json"
            config = json.loads(file.read_text(encoding="utf-8"))
            kind, fields, found = config.get("model_type"), model_fields(config), {}
            file = path / "model.safetensors.index.json"
            index = json.loads(file.read_text())["weight_map"] if file.exists() else {"": "model.safetensors"}
            for name in sorted(set(index.values())):
                if os.path.basename(name) != name:
                    raise ValueError(f"{name} is a path out of the folder")
                file = path / name
                found |= load_file(file)
    except Exception as error:  # whatever readers of JSON, zip, pickle and safetensors make of a damaged file
        why = getattr(error, "strerror", None) or reason(error)
        found = f"{file} cannot be read: {why}" if path.exists() else f"{path} does not exist"
        if (path / "metrics.jsonl").exists():
            run = shlex.quote(str(path))
            raise ValueError(f"{run} is a run: python checkpoint.py export {run} DIR, then take DIR") from None
        raise ValueError(f"{found}; expected a Hugging Face folder (hf download NAME --local-dir DIR makes one), "
                         "nanoGPT's ckpt.pt or, to sample from or export, a run with a checkpoint") from None
    base, tensors = FAMILIES[kind]["names"]["embed"].split(".")[0] + ".", {}
    for name, tensor in found.items():
        name = name.removeprefix("_orig_mod.")
        name = name if name.startswith((base, "lm_head.")) else base + name  # OpenAI's own files have no prefix
        if not re.search(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$", name):  # constants of older versions
            tensors[name] = conv1d(kind, name, tensor)
    return kind, fields, tensors


def import_hf(model, path):
    """The function (name, seed) -> whole tensor of each parameter of `model`, which may be on the meta device.

    In the place of model.initial, it makes distributed.materialize fill any layout, each process reading its own share
    of the files. It gives a tensor once: a file is unmapped when its last one has gone. ValueError if a tensor is
    missing, unexpected or of another shape; learned positions may be more than the model has.
    """
    kind, fields, tensors = read_hf(path)
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters(model).items()}
    parts, embed = hf_names(kind, shapes), FAMILIES[kind]["names"]["embed"] + ".weight"
    if "transformer.wpe.weight" in tensors:
        tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"][:shapes["position.weight"][0]]
    head = tensors.pop("lm_head.weight", None) if fields.get("tied") else None  # some files have the tied head, too
    if head is not None and embed in tensors and not torch.equal(head, tensors[embed]):
        raise ValueError(f"{path}: lm_head.weight is not {embed}, though tie_word_embeddings is true")
    for name, tensor in tensors.items():
        if not (torch.is_tensor(tensor) and tensor.is_floating_point()):
            kind = getattr(tensor, "dtype", type(tensor))
            raise ValueError(f"{path}: {name} is {kind}, expected a tensor of floating point, not quantized")
    wanted = {theirs: (sum(shapes[name][0] for name in ours), *shapes[ours[0]][1:]) for theirs, ours in parts.items()}
    compare({name: tuple(tensor.shape) for name, tensor in tensors.items()}, wanted,
            f"{path} is no such model (has it fewer ids than the tokenizer of --data, or positions than --seq_len?)")
    found = {name: part for theirs, ours in parts.items() for name, part in zip(ours, tensors[theirs].chunk(len(ours)))}
    return lambda name, seed=0: found.pop(name)


@torch.no_grad()
def open_model(path, build):
    """(model on the CPU, extra): of a run's newest checkpoint, its step_* folder, a Hugging Face folder, or nanoGPT's.

    build(fields) makes the model. `extra` is as train.py saves it: "model", its fields, and "tokenizer" and "data", for
    data.load_tokenizer; the tokenizer of a folder has the folder's path for a name.
    """
    folder, step, checkpointer = Path(path).resolve(), None, Checkpointer(path)
    if re.fullmatch(r"step_\d{8,}", folder.name) and not (folder / "config.json").exists():
        checkpointer.root, step = folder.parent, int(folder.name[5:])
    extra = checkpointer.read_extra(step)
    if foreign := extra is None:
        if Path(path, "metrics.jsonl").exists():
            raise ValueError(f"{path} is a run without a complete checkpoint")
        fields = read_hf(path)[1]
        known = "gpt2" if fields["vocab_size"] in (50257, 50304) else None  # 50304: as nanoGPT rounds it up
        own = os.path.abspath(path) if Path(path, "tokenizer.json").exists() else known
        extra = {"model": fields, "tokenizer": own, "data": None}
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        if not os.path.exists(extra["data"]):  # moved since, which the run knows if it has been resumed there
            extra["data"] = str(json.loads((checkpointer.root.parent / "config.json").read_text("utf-8"))["data"])
    try:
        with torch.device("meta"):
            model = build(extra["model"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} was saved by another version of this program: {error}") from None
    initial = import_hf(model, path) if foreign else None  # names and shapes are known to fit before there is memory
    # `to_empty` takes 0.3 s to import. Not strict: a module that stands in two places has a parameter once.
    values = {name: torch.empty(p.shape) for name, p in model.named_parameters()}
    model.load_state_dict(values, strict=False, assign=True)
    if foreign:
        for name, parameter in parameters(model).items():
            parameter.copy_(initial(name))
    else:
        checkpointer.load(model, step=step)
    return model, extra


@torch.no_grad()
def export_hf(model, fields, folder, dtype=torch.float32, shard_bytes=5 * 10 ** 9, eot=None, files=None):
    """Write `folder` for transformers' from_pretrained: `model` in `dtype`, in files of `shard_bytes`, and its config.

    fields: ModelConfig as a dict; eot: id of the token between texts; files: {name: JSON content} more, such as the
    tokenizer's. ValueError if transformers has no class for this model or `dtype` not its numbers.
    """
    ids = {"bos_token_id": eot, "eos_token_id": eot}
    config = hf_config(fields) | ids | {"torch_dtype": str(dtype)[6:]}
    kind, state = config["model_type"], parameters(model)
    groups, room, index = [], 0, {}  # in the model's order; a tensor above the limit has a file of its own
    for name, ours in hf_names(kind, state).items():
        size = dtype.itemsize * sum(state[part].numel() for part in ours)
        if size > room:
            groups, room = groups + [{}], shard_bytes
        groups[-1][name] = ours
        room -= size
    with new_folder(folder) as folder:
        for number, group in enumerate(groups, 1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
            tensors = {name: conv1d(kind, name, torch.cat([state[part] for part in ours])).to(dtype).contiguous()
                       for name, ours in group.items()}
            if odd := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
                raise ValueError(f"{odd[0]} is not finite in {dtype}: take --dtype fp32, if it is finite there")
            save_file(tensors, folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(group, file)
        files = {"config.json": config, "generation_config.json": ids, **(files or {})}
        if len(groups) > 1:
            total = dtype.itemsize * sum(parameter.numel() for parameter in state.values())
            files["model.safetensors.index.json"] = {"metadata": {"total_size": total}, "weight_map": index}
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# ---- python checkpoint.py -------------------------------------------------------------------------------------------


@dataclass
class CheckpointConfig:
    """Look into the checkpoints of a run, or carry a model to and from Hugging Face's form."""

    command: Annotated[Literal["inspect", "verify", "export", "import"], "what to do"]
    folder: Annotated[str, "a run, or its step_* folder; export, import: also a Hugging Face folder, nanoGPT's ckpt.pt"]
    out: Annotated[list[str], "export, import: the folder to make"] = field(default_factory=list)
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], "of the exported weights"] = "fp32"
    max_shard_size: Annotated[str, "an exported file's limit, in KB, MB or GB"] = "5GB"

    def __post_init__(self):
        """Refuse what does not go with the command."""
        paths = 2 if self.command in ("export", "import") else 1
        if 1 + len(self.out) != paths:
            raise ValueError(f"{self.command} takes {paths} paths, found {1 + len(self.out)}")
        if self.command != "export" and (self.dtype, self.max_shard_size) != ("fp32", "5GB"):
            raise ValueError(f"--dtype and --max_shard_size have no effect with {self.command}: they are for export")
        if not re.fullmatch("[1-9][0-9]*[KMG]B", self.max_shard_size):
            raise ValueError(f"--max_shard_size is {self.max_shard_size}, expected a number with its unit, as in 500MB")


def folders(path):
    """The checkpoint folders that `path` means, ascending: itself, or a run's. ValueError if there are none."""
    path = Path(path).resolve()
    found = [path] if path.name.startswith("step_") else sorted(path.glob("checkpoints/step_*"))
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
    import data
    from model import GPT, ModelConfig
    from train import DTYPES, command

    with command(CheckpointConfig, "checkpoint.py") as config:
        if config.command in ("inspect", "verify"):
            return {"inspect": inspect, "verify": verify}[config.command](config.folder)
        model, extra = open_model(config.folder, lambda fields: GPT(ModelConfig(**fields)))
        out, fields = config.out[0], asdict(model.config)
        if config.command == "import":
            with new_folder(out):
                # No optimizer: by this train.py knows an import, which it refuses to go on from.
                extra |= dict(config={"optimizer": None}, model=fields)
                Checkpointer(out).save(0, model, (), extra)
        else:
            tokenizer = data.load_tokenizer(extra["tokenizer"], extra["data"]) if extra["tokenizer"] else None
            size = int(config.max_shard_size[:-2]) * 1000 ** ("KMG".index(config.max_shard_size[-2]) + 1)
            files = data.hf_tokenizer(tokenizer) if tokenizer else {}
            export_hf(model, fields, out, DTYPES[config.dtype], size, tokenizer and tokenizer.eot_token, files)
        print(f"{out} is written" + f": try python model.py {out}" * bool(extra["tokenizer"]))


if __name__ == "__main__":
    main()
