"""Text in, token shards out, and batches from them.

A corpus is tokenized once (`tiktoken`, several processes) into memory-mappable shards, `*.bin` in llm.c's two formats.
Training reads windows of T + 1 tokens from them in a pseudo-random order that is computed and never stored, so a batch
is a function of (seed, step) for any corpus. `torch.utils.data.DataLoader` runs the processes of both.

    python data.py                                        # the Python standard library's own sources, as bytes
    python data.py book.txt --out data/book --tokenizer gpt2
    python data.py hf:HuggingFaceFW/fineweb-edu/sample-10BT --out data/fineweb --tokenizer gpt2
"""
import base64
import bisect
import functools
import gzip
import importlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import secrets
import shutil
import struct
import sys
import sysconfig
import threading
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import tiktoken
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

# ---- tokenizers ------------------------------------------------------------------------------------------------------


def load_tokenizer(name, folder=None):
    """The `tiktoken.Encoding` called "bytes", "bpe" (which `--train_bpe` stored in `folder`) or as tiktoken knows it.

    Or the one of a Hugging Face folder with a tokenizer.json, whose path is its name.

    ValueError for an unknown name, OSError for one that has to be downloaded and cannot be.
    """
    if name == "bytes":  # every pattern gives the same ids; long runs of anything go fastest (30 MB/s, "." gives 7)
        pattern, ranks = r"[\s\S]{1,256}", {bytes([byte]): byte for byte in range(256)}
    elif name == "bpe" and folder:
        # tiktoken's own reader caches by file name: trained again into the same folder, it would return the old ids
        lines = (Path(folder) / "tokenizer.tiktoken").read_bytes().splitlines()
        pattern = read_meta(folder)["pattern"]
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    elif name and Path(name, "tokenizer.json").exists():
        return read_hf_tokenizer(Path(name))
    elif name in tiktoken.list_encoding_names():
        try:
            return tiktoken.get_encoding(name)
        except OSError as error:  # which the exceptions of `requests` are, too
            raise OSError(f"the tokenizer '{name}' needs the network once, and that failed ({type(error).__name__}): go"
                          " online, set TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer bytes, which "
                          "needs neither") from None
    else:
        known = ", ".join(tiktoken.list_encoding_names())
        raise ValueError(f"unknown tokenizer {name}; known: bytes, {known}; --train_bpe N makes your own")
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})


def store_bpe(texts, size, folder):
    """Trains a byte-level BPE of `size` ids on an iterator of texts; `load_tokenizer("bpe", folder)` then has it."""
    bpe = need("rustbpe").Tokenizer()
    bpe.train_from_iterator(texts, vocab_size=size - 1)  # <|endoftext|> is the last id
    # tiktoken's own file format, but it has no place for the pattern that splits text into words: meta.json keeps that
    lines = [base64.b64encode(bytes(token)) + b" %d\n" % rank for token, rank in bpe.get_mergeable_ranks()]
    (folder / "tokenizer.tiktoken").write_bytes(b"".join(lines))
    (folder / "meta.json").write_text(json.dumps({"pattern": bpe.get_pattern()}), encoding="utf-8")


GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's own


def hf_bytes():
    """{byte: the printable character that stands for it in GPT-2's vocabulary, and in all byte-level ones since}."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)}


def hf_tokenizer(encoding):
    """{file name: content} of the JSON files that give transformers' AutoTokenizer the ids of a tiktoken.Encoding.

    One difference is theirs: <|endoftext|> within a text is the special token there, thirteen characters here.
    """
    ranks, letters = encoding._mergeable_ranks, hf_bytes()
    words = {token: token.decode("latin-1").translate(letters) for token in sorted(ranks, key=ranks.get)
             if token != b"<|endoftext|>"}  # a text may teach it to a BPE, but there the special token comes first
    # tiktoken joins any two neighbours that make a token: each way to cut a token into two tokens is a merge.
    merges = [f"{words[token[:i]]} {words[token[i:]]}" for token in words for i in range(1, len(token))
              if token[:i] in words and token[i:] in words]
    model = dict(type="BPE", vocab={word: ranks[token] for token, word in words.items()}, merges=merges)
    special = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    added = [dict(content=name, id=number, **special) for name, number in encoding._special_tokens.items()]
    # To their regular expressions (Oniguruma) x{1,3}+ is (x{1,3})+; here it is x{1,3} that gives nothing back.
    pattern = re.sub(r"(\{\d+(,\d*)?\})\+", r"\1", encoding._pat_str)
    split = dict(type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False)
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    before = dict(type="Sequence", pretokenizers=[split, level])
    content = dict(version="1.0", added_tokens=added, pre_tokenizer=before, decoder=level, model=model)
    end = "<|endoftext|>"
    config = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token=end, eos_token=end)
    return {"tokenizer.json": content, "tokenizer_config.json": config}


def read_hf_tokenizer(folder):
    """The tiktoken.Encoding of a byte-level BPE in Hugging Face's form, as GPT-2's, Llama 3's, Qwen's and ours are.

    What a tokenizer does before it splits (Qwen's Unicode NFC) is left out: it changes decomposed letters alone.
    """
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, before = content["model"], content["pre_tokenizer"] or {}
    parts = {part.get("type"): part for part in before.get("pretokenizers", [before])}
    if model["type"] != "BPE" or "ByteLevel" not in parts:
        raise ValueError(f"{folder}/tokenizer.json is no byte-level BPE, which is all that tiktoken can be")
    pattern = parts["Split"]["pattern"]["Regex"] if "Split" in parts else GPT2_PATTERN
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    if "<|endoftext|>" not in special:  # Llama's has another name
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        special["<|endoftext|>"] = special[config["eos_token"]]
    letters = str.maketrans({letter: chr(byte) for byte, letter in hf_bytes().items()})
    ranks = {word.translate(letters).encode("latin-1"): rank for word, rank in model["vocab"].items()
             if word not in special}
    return tiktoken.Encoding(str(folder), pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def need(module):
    """An optional module, or an ImportError that says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        package = module.split(".")[0]
        raise ImportError(f"this needs the package {package}, which is not installed: pip install {package}") from None


# ---- sources -> documents --------------------------------------------------------------------------------------------
# A document is a `str` (a row of a table) or the `Path` of a text file, which may be larger than memory.


def find_files(sources):
    """The files behind `sources`, in a fixed order; "-" and "hf:..." stay as they are.

    None are the embedded default, the standard library: real code of several megabytes that every reader has.
    FileNotFoundError or ValueError for a source that is missing or no text: known before an hour of others is read.
    """
    if not sources:
        skip = {"test", "tests", "idlelib", "site-packages", "__pycache__"}
        return [path for path in walk(sysconfig.get_path("stdlib"), skip) if path.suffix == ".py"]
    files = []
    for source in sources:
        if source == "-" or source.startswith("hf:"):
            files.append(source)
        elif os.path.isdir(source):
            found = walk(source)
            texts = list(filter(is_text, found))
            files += texts
            print(f"{source}: {len(texts)} text files; {len(found) - len(texts)} binary ones are left out")
        elif not os.path.isfile(source):
            raise FileNotFoundError(f"{source} is neither a file nor a folder (nor hf:NAME, nor - for standard input)")
        elif not is_text(source):
            raise ValueError(f"{source} has NUL bytes in its first 8 KB: not text, .jsonl, .jsonl.gz or .parquet")
        else:
            files.append(Path(source))
    return files


def walk(root, skip=()):
    """The files in and below `root`, sorted by path, without hidden ones (.git is no prose) and folders to skip."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in skip]  # os.walk goes into these
        files += [Path(folder, name) for name in names if name[0] != "."]
    return sorted(files)


def is_text(path):
    """Text has no NUL bytes; the first 8 KB tell, as in git. A table counts as text, compressed or not."""
    with open(path, "rb") as file:
        return is_table(path) or b"\0" not in file.read(8192)


def is_table(file):
    """Whether each row is a document, by the name."""
    return str(file).startswith("hf:") or str(file).endswith((".jsonl", ".jsonl.gz", ".parquet"))


def open_table(file):
    """Yields the rows of a table as dicts. hf:NAME[/CONFIG][:SPLIT] is streamed; NAME is USER/DATASET."""
    name = str(file)
    if name.startswith("hf:"):
        path, _, split = name[3:].partition(":")
        parts = path.split("/")
        if not all(parts) or len(parts) > 3:
            raise ValueError("expected hf:NAME[/CONFIG][:SPLIT], as in hf:HuggingFaceFW/fineweb-edu/sample-10BT:train")
        load = need("datasets").load_dataset
        yield from load("/".join(parts[:2]), *parts[2:], split=split or "train", streaming=True)
    elif name.endswith(".parquet"):
        for batch in need("pyarrow.parquet").ParquetFile(file).iter_batches(1024):
            yield from batch.to_pylist()
    else:
        with (gzip.open if name.endswith(".gz") else open)(file, "rt", encoding="utf-8", errors="replace") as lines:
            yield from (json.loads(line) for line in lines if line.strip())


def read_table(file, text_key):
    """Yields the texts of a table, row by row; ValueError names the row that has none or cannot be read."""
    number = 1
    try:
        for row in open_table(file):
            text = row.get(text_key) if isinstance(row, dict) else None
            if not isinstance(text, str):
                raise ValueError(f"no text under --text_key {text_key} in {str(row)[:200]}")
            # JSON can hold half a character (\ud800), which no tokenizer takes: it becomes "?"
            yield text.encode("utf-8", "replace").decode("utf-8")
            number += 1
    except (ValueError, OSError, RuntimeError, EOFError, zlib.error) as error:  # no JSON, a cut file, no network
        # pyarrow and datasets explain themselves in many lines
        raise ValueError(f"{file}, row {number}: {' '.join(str(error).split())}") from None


def read_documents(files, text_key):
    """Yields the documents of `files` in order, without empty ones."""
    for file in files:
        if is_table(file):
            yield from filter(None, read_table(file, text_key))
        elif file.stat().st_size:
            yield file


# ---- documents -> tokens --------------------------------------------------------------------------------------------

PIECE = 1 << 18  # characters; a run of a million spaces makes tiktoken's regular expressions panic or return nothing
BATCH = 32  # pieces a tokenizer process gets at once: sending single rows would cost as much as their tokens


def pieces(document):
    """Yields a document's text in pieces of less than 2 PIECE characters; bytes that are not UTF-8 become U+FFFD.

    A piece ends between a letter or digit and white space. The patterns of all tiktoken's encodings split there in any
    context, so the pieces' tokens are the whole's. (After a newline they do not: several newlines may be one token, and
    cl100k_base has tokens like ".\\n".) Text without such a place is cut anywhere, which costs a token or two.
    """
    utf8 = {"encoding": "utf-8", "errors": "replace", "newline": ""}  # newline: "\r\n" stays as it is
    with open(document, **utf8) if isinstance(document, Path) else io.StringIO(document, newline="") as file:
        rest = ""
        while len(block := file.read(PIECE)) == PIECE:
            text = rest + block
            ends = (i for i in range(len(text) - 1, 0, -1) if text[i].isspace() and text[i - 1].isalnum())
            end = next(ends, len(text))
            rest = text[end:]
            yield text[:end]
        if rest + block:
            yield rest + block


def split_corpus(documents, val_fraction):
    """Yields (split, number, text) in order; number is the document's, from 1, where the split begins it, else 0.

    Validation is every k-th document, k = 1 / val_fraction. Fewer than k documents are read twice: their characters are
    counted, then cut, for a share of few documents would be far off. The one on the border has a part in each split.
    """
    every = round(1 / val_fraction) if val_fraction else 0
    documents = iter(documents)
    head = list(itertools.islice(documents, every))
    few = len(head) < every
    if few:
        left = int(sum(len(text) for document in head for text in pieces(document)) * (1 - val_fraction))
    for number, document in enumerate(itertools.chain(head, documents), 1):
        if not few:
            left = 0 if every and number % every == 0 else sys.maxsize  # characters that go to the training split
        begins = {"train": number, "val": number}
        for text in pieces(document):
            for split, part in (("train", text[:left]), ("val", text[left:])):
                if part:
                    yield split, begins[split], part
                    begins[split] = 0
            left = max(0, left - len(text))


class Encoder:
    """What DataLoader's processes do: indexed by texts of `split_corpus`, it gives their tokens, one array a split.

    <|endoftext|> goes before each document, as in llm.c; within one it is thirteen characters like others.
    """

    def __init__(self, encoding):
        self.encoding = encoding
        self.dtype = "<u2" if encoding.n_vocab <= 1 << 16 else "<u4"  # a uint16 would silently turn 65,536 into 0

    def __getitems__(self, entries):
        return [self.encode(split, [entry for entry in entries if entry[0] == split]) for split in ("train", "val")]

    def encode(self, split, entries):
        """(split, its token ids, its size in UTF-8 bytes, the last document that began)."""
        ids = [np.array([], self.dtype)]
        for _, number, text in entries:
            if number:
                ids.append([self.encoding.eot_token])
            # bytes are their own ids: without a list of Python integers between, they go ten times as fast
            is_bytes = self.encoding.name == "bytes"
            ids.append(np.frombuffer(text.encode(), "u1") if is_bytes else self.encoding.encode_ordinary(text))
        size = sum(len(text.encode()) for *_, text in entries)
        last = max((number for _, number, _ in entries), default=0)
        return split, np.concatenate([np.asarray(part, self.dtype) for part in ids]), size, last


def follow_parent(_):
    """In a tokenizer process: when its parent is killed it ends too, rather than wait for ever to hand over tokens."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


# ---- tokens -> shards ------------------------------------------------------------------------------------------------

# llm.c's (magic, version) -> token type, and what such a file means where no meta.json says more: ids of GPT-2, Llama 3
FORMATS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
LLM_C = {"<u2": {"tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256},
         "<u4": {"tokenizer": None, "vocab_size": 128256, "eot": 128001}}
HEADERLESS = 'nanoGPT\'s files need a meta.json like {"header": false, "tokenizer": "gpt2", "vocab_size": 50257}'
HEADER = 256 * 4  # bytes: 256 int32, of which magic, version and number of tokens are used


def prepare(sources, out, tokenizer="bytes", val_fraction=0.1, shard_tokens=100_000_000, workers=None, text_key="text",
            train_bpe=0):
    """Tokenizes `sources` (none: the standard library) into shards and meta.json in the new folder `out`; returns meta.

    `workers`: tokenizer processes, None for one per core. What can be known is checked before the corpus is read.
    ValueError or OSError leave nothing written; FileExistsError if `out` exists or another process finished it first.
    """
    if val_fraction != 0 and not 0.0001 <= val_fraction <= 0.5:
        raise ValueError(f"--val_fraction is {val_fraction}, expected 0.0001 to 0.5, or 0 for no validation split")
    if not 1 <= shard_tokens < 1 << 31:
        raise ValueError(f"--shard_tokens is {shard_tokens}, expected 1 to {(1 << 31) - 1}, what a header can hold")
    if train_bpe and (tokenizer != "bytes" or train_bpe < 257):
        raise ValueError(f"--train_bpe {train_bpe} makes the tokenizer, of 257 ids or more: no --tokenizer {tokenizer}")
    out = Path(out).resolve()  # a link may lead to another disk, and `stage` has to be on the same one
    refuse_existing(out)
    load_tokenizer(tokenizer)  # for its error alone: the file it may need is cached from here on
    files = find_files(sources)
    for file in filter(is_table, files):
        next(read_table(file, text_key), None)  # a missing package, key or network shows with the first row
    for other in out.parent.glob(f".{out.name}.*"):
        print(f"{other} is of a preparation that still runs, or was killed: then remove it")
    # written beside `out` and renamed in one step when complete; a name of its own, so that two processes cannot mix
    stage = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    stage.mkdir(parents=True)
    try:
        if "-" in files:  # it is read twice, so it becomes a file
            with open(stage / "stdin", "wb") as spool:
                shutil.copyfileobj(sys.stdin.buffer, spool)
            files = [stage / "stdin" if file == "-" else file for file in files]

        def corpus():
            return split_corpus(read_documents(files, text_key), val_fraction)

        if train_bpe:
            store_bpe((text for split, _, text in corpus() if split == "train"), train_bpe, stage)
        meta = tokenize(corpus(), stage, "bpe" if train_bpe else tokenizer, shard_tokens, workers)
        (stage / "stdin").unlink(missing_ok=True)
        refuse_existing(out)
        stage.rename(out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return meta


def refuse_existing(out):
    """FileExistsError unless `out` is free, or an empty folder."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is left as it is: remove it, or choose another --out")


def tokenize(corpus, folder, tokenizer, shard_tokens, workers):
    """Writes shards of both splits and meta.json into `folder`, with a progress bar on a terminal; returns meta."""
    encoder = Encoder(load_tokenizer(tokenizer, folder))
    meta = {**read_meta(folder), "tokenizer": tokenizer, "vocab_size": encoder.encoding.n_vocab,
            "eot": encoder.encoding.eot_token, "dtype": np.dtype(encoder.dtype).name,
            "train_tokens": 0, "val_tokens": 0, "train_bytes": 0, "val_bytes": 0, "documents": 0}
    if workers is None:  # bytes go through one process faster than through a pipe to others
        workers = 0 if tokenizer == "bytes" else getattr(os, "process_cpu_count", os.cpu_count)()
    # the texts are the "indices": DataLoader draws few ahead of its processes, so memory stays flat, and keeps order
    loader = DataLoader(encoder, batch_size=BATCH, sampler=corpus, num_workers=workers, collate_fn=list,
                        worker_init_fn=follow_parent)
    try:
        with tqdm(unit=" tokens", unit_scale=True, disable=None) as bar:
            for split, ids, size, number in itertools.chain.from_iterable(loader):
                append(folder / split, ids, meta[f"{split}_tokens"], shard_tokens)
                meta[f"{split}_tokens"] += len(ids)
                meta[f"{split}_bytes"] += size
                meta["documents"] = max(meta["documents"], number)
                bar.set_postfix(documents=meta["documents"], refresh=False)
                bar.update(len(ids))
    except RuntimeError:  # how DataLoader says that one of its processes is gone
        raise OSError(f"one of {workers} tokenizer processes died (out of memory?): try fewer --workers") from None
    if not meta["train_tokens"]:
        raise ValueError("the sources hold no text to train on")
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return meta


def append(name, ids, total, limit):
    """Adds ids to the shards name_000000.bin, ..., which hold `total` tokens so far and at most `limit` each."""
    magic, version = next(key for key, dtype in FORMATS.items() if dtype == ids.dtype)
    while len(ids):
        shard, filled = divmod(total, limit)
        part, ids = np.split(ids, [limit - filled])
        with open(f"{name}_{shard:06d}.bin", "r+b" if filled else "wb") as file:
            file.write(struct.pack("<3i", magic, version, filled + len(part)))
            file.seek(HEADER + filled * part.itemsize)  # what a new file skips here reads as zeros
            file.write(part.tobytes())
        total += len(part)


def read_meta(folder):
    """meta.json of a data set as a dict, empty if there is none."""
    path = Path(folder) / "meta.json"
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


# ---- shards -> windows in a computed order ---------------------------------------------------------------------------


def mix(*numbers):
    """Integers -> 64 pseudo-random bits (the finalizer of SplitMix64; Steele, Lea and Flood, 2014)."""
    bits = 0
    for number in numbers:
        bits = (bits ^ number) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        bits ^= bits >> 31
    return bits


def permute(i, n, key):
    """Where a pseudo-random permutation of range(n) takes i, in O(1) time and memory for any n.

    A Feistel network (Luby and Rackoff, 1988) permutes the pairs (left, right) with both below s, s * s >= n, whatever
    its round function is: each round can be undone. Where it leaves range(n) it is applied again until it comes back
    (cycle walking; Black and Rogaway, 2002), which is rare, for s * s is hardly above n.
    """
    side = math.isqrt(n - 1) + 1
    while True:
        left, right = divmod(i, side)
        for turn in range(4):  # three already pass for random in one direction, four in both
            left, right = right, (left + mix(key + 4 * right + turn)) % side
        i = left * side + right
        if i < n:  # the chance is n / side ** 2, and that is above 1/2 but for the smallest n
            return i


class TokenDataset:
    """One split of a prepared folder (or of llm.c's or nanoGPT's) as an endless, shuffled stream of windows.

    ds[i] -> (x, y), int64 (T,), y[j] == x[j + 1], for any i >= 0: every `windows` indices are an epoch, which visits
    each window once. ds.fixed(i) is window i in file order, for evaluation. `tokens` is the split's size, `meta` what
    is known of it (tokenizer: None if tiktoken cannot decode the ids). `"header": false` in meta.json reads nanoGPT's
    plain uint16 files. Opening reads headers alone. FileNotFoundError without shards, ValueError for damaged or too
    short ones.
    """

    def __init__(self, folder, split, seq_len, seed=0):
        self.arguments = folder, split, seq_len, seed
        self.seq_len, self.seed = seq_len, seed
        meta = read_meta(folder)
        header = meta.get("header", True)
        self.shards = [open_shard(path, header) for path in sorted(Path(folder).glob(f"*{split}*.bin"))]
        if not self.shards:
            raise FileNotFoundError(f"{folder} has no *{split}*.bin: python data.py SOURCE --out {folder} prepares it, "
                                    "and with --val_fraction above 0 both splits")
        known = LLM_C[self.shards[0][1]] if header else {"tokenizer": None, "vocab_size": None, "eot": None}
        self.meta = {**known, **meta}
        if not self.meta["vocab_size"]:  # it would be in nanoGPT's meta.pkl, but reading a pickle can run code
            raise ValueError(f"{folder} does not tell its vocabulary; {HEADERLESS}")
        counts = [tokens for *_, tokens in self.shards]
        self.tokens = sum(counts)
        if self.tokens != meta.get(f"{split}_tokens", self.tokens):
            raise ValueError(f"{folder} has {self.tokens:,} {split} tokens, meta.json says {meta[f'{split}_tokens']:,}")
        # windows up to the end of each shard; none reaches into the next one, whose text is another
        self.ends = list(itertools.accumulate(max(0, tokens - 1) // seq_len for tokens in counts))
        self.windows = self.ends[-1]
        if not self.windows:
            raise ValueError(f"the longest {split} shard of {folder} has {max(counts):,} tokens, --seq_len {seq_len} "
                             f"needs {seq_len + 1:,}: give more text or a shorter --seq_len")
        # a map holds its file open, and systems allow 1,024 of them by default: 10^12 tokens are 10,000 shards
        self.map = functools.lru_cache(256)(map_shard)

    def __reduce__(self):  # a spawned process opens the files itself, rather than being sent their contents
        return TokenDataset, self.arguments

    def __getitem__(self, i):
        x, y = self.__getitems__([i])
        return x[0], y[0]

    def __getitems__(self, indices):
        """What DataLoader calls for a whole micro-batch: x and y, int64 (B, T)."""
        places = []
        for i in indices:
            epoch, i = divmod(i, self.windows)
            key = mix(self.seed, epoch)
            places.append(self._place(permute(i, self.windows, key), key if epoch else 0))
        return self._read(places)

    def fixed(self, i):
        """(x, y), int64 (T,), of window i in file order, 0 <= i < windows."""
        x, y = self._read([self._place(range(self.windows)[i])])
        return x[0], y[0]

    def _place(self, window, key=0):
        """(shard, first token). A key moves all windows of a shard by up to T - 1 tokens, so that each epoch cuts the
        text elsewhere; their number stays, for the last one is held within the shard."""
        shard = bisect.bisect(self.ends, window)
        window -= self.ends[shard - 1] if shard else 0
        phase = mix(key, shard) % self.seq_len if key else 0
        return shard, min(window * self.seq_len + phase, self.shards[shard][3] - 1 - self.seq_len)

    def _read(self, places):
        maps = [self.map(*self.shards[shard]) for shard, _ in places]
        rows = np.stack([tokens[start:start + self.seq_len + 1] for tokens, (_, start) in zip(maps, places)])
        if rows.max() >= self.meta["vocab_size"]:  # found here, it has a file's name; on a GPU it would be an assertion
            path = self.shards[places[rows.max(axis=1).argmax()][0]][0]
            raise ValueError(f"{path} has the id {rows.max():,}, beyond its vocabulary of {self.meta['vocab_size']:,}")
        x, y = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        return torch.from_numpy(x), torch.from_numpy(y)  # (B, T) each


def open_shard(path, header):
    """(path, token type, offset in bytes, tokens) of a shard; ValueError if the file is not what its header says."""
    size = path.stat().st_size
    if not header:
        return path, "<u2", 0, size // 2
    with open(path, "rb") as file:
        magic, version, tokens = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    if (magic, version) not in FORMATS:
        raise ValueError(f"{path}: no llm.c header: magic {magic}, version {version}, known {[*FORMATS]}; {HEADERLESS}")
    dtype = FORMATS[magic, version]
    expected = HEADER + tokens * np.dtype(dtype).itemsize
    if size != expected:
        raise ValueError(f"{path} has {size:,} bytes, but {expected:,} by its header ({tokens:,} tokens): damaged")
    return path, dtype, HEADER, tokens


def map_shard(path, dtype, offset, tokens):
    """A shard's tokens, on disk until they are read; as a plain array, whose slices cost a third of an np.memmap's."""
    return np.memmap(path, dtype, "r", offset, (tokens,)).view(np.ndarray)


def micro_batches(step, batch_size, micro_batch, rank, world):
    """Yields ranges of stream indices. Step s is windows [s * batch_size, (s + 1) * batch_size) of the stream whatever
    the layout; ranks and micro-steps only divide it."""
    share = batch_size // world  # consecutive, so that the ranks' shares one after another are the global batch
    for first in itertools.count(step * batch_size + rank * share, batch_size):
        for i in range(first, first + share, micro_batch):
            yield range(i, i + micro_batch)


def batches(dataset, step, batch_size, micro_batch, rank=0, world=1, device="cpu", workers=None):
    """Endless iterator of (x, y), int64 (micro_batch, T) on `device`, from the first micro-batch of `step` on.

    `batch_size` is global, in windows a step. `workers`: processes that read ahead, None for two beside a GPU and none
    on a CPU, where this process reads faster than they deliver.
    """
    cuda = torch.device(device).type == "cuda"
    loader = DataLoader(
        dataset, batch_sampler=micro_batches(step, batch_size, micro_batch, rank, world),
        collate_fn=tuple,  # (x, y) as it is
        num_workers=2 * cuda if workers is None else workers, pin_memory=cuda,
        generator=torch.Generator())  # else it would draw from the global random numbers
    for x, y in loader:
        yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


# ---- run by itself ---------------------------------------------------------------------------------------------------


@dataclass
class DataConfig:
    """Text in, token shards out."""
    sources: Annotated[list[str], "text files, folders, .jsonl[.gz], .parquet, hf:NAME[/CONFIG][:SPLIT], - for stdin; "
                       "none: the Python standard library's own sources"] = field(default_factory=list)
    out: Annotated[str, "new folder for the shards and meta.json"] = "data/stdlib"
    tokenizer: Annotated[str, "bytes, or an encoding that tiktoken knows (gpt2, cl100k_base, o200k_base)"] = "bytes"
    val_fraction: Annotated[float, "share of the validation split: every k-th document, or the end of few"] = 0.1
    shard_tokens: Annotated[int, "most tokens in one file"] = 100_000_000
    workers: Annotated[int | None, "tokenizer processes (default: one per core; none for bytes)"] = None
    text_key: Annotated[str, "the field of .jsonl, .parquet and hf: rows that is the text"] = "text"
    train_bpe: Annotated[int, "train a tokenizer of so many ids on the training split and use it"] = 0


def main():
    """`python data.py`: prepares a data set and says what to type next."""
    from train import parse_args  # here alone: everything above can be lifted into another project as it is

    config = parse_args(DataConfig, "data.py")
    try:
        meta = prepare(**asdict(config))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"data.py: {error}")
    except KeyboardInterrupt:
        sys.exit("data.py: interrupted, nothing was written")
    print(f"{config.out}: {meta['train_tokens']:,} train and {meta['val_tokens']:,} val tokens "
          f"({meta['tokenizer']}, {meta['vocab_size']:,} ids)\nnext: python train.py --data {config.out}")


if __name__ == "__main__":
    main()
