"""Text in, token shards out, and batches from them.

A corpus is tokenized once (`tiktoken`, which lets threads run at once) into memory-mappable shards, `*.bin` in llm.c's
two formats. Training reads windows of T + 1 tokens from them in a pseudo-random order that is computed and never
stored, so a batch is a function of (seed, step) for any corpus. `torch.utils.data.DataLoader` reads them ahead.

    python data.py                                        # the Python standard library's own sources, as bytes
    python data.py hf:HuggingFaceFW/fineweb-edu/sample-10BT --out data/fineweb --tokenizer gpt2
    python data.py chat.jsonl --prompt_key prompt --response_key response --out data/chat        # for fine-tuning
"""
import base64
import bisect
import functools
import gzip
import io
import itertools
import json
import math
import os
import re
import shlex
import sys
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import tiktoken
import torch
from tqdm import tqdm


def require(condition, message):
    """ValueError with a message of one line (what was found, what is expected, what to do) unless a condition holds."""
    if not condition:
        raise ValueError(message)


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def load_tokenizer(name, folder=None):
    """The `tiktoken.Encoding` called "bytes", "bpe" (which `--train_bpe` stored in `folder`) or as tiktoken knows it.

    Or the one of a Hugging Face folder with a tokenizer.json, whose path is its name. ValueError for an unknown name,
    OSError for one that has to be downloaded and cannot be.
    """
    if name == "bytes":  # every pattern gives the same ids; long runs of anything go fastest (30 MB/s, "." gives 7)
        pattern, ranks = r"[\s\S]{1,256}", {bytes([byte]): byte for byte in range(256)}
    elif name == "bpe" and folder:
        # tiktoken's own reader caches by file name: trained again into the same folder, it would return the old ids
        lines = Path(folder, "tokenizer.tiktoken").read_bytes().splitlines()
        pattern = read_meta(folder)["pattern"]
        ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    elif name and Path(name, "tokenizer.json").exists():
        return read_hf_tokenizer(Path(name))
    else:
        known = ", ".join(["bytes", *tiktoken.list_encoding_names()])
        require(os.sep not in str(name), f"{name} has no tokenizer.json")
        require(name in known.split(", "), f"unknown --tokenizer {name}; known: {known}; --train_bpe N makes your own")
        try:
            return tiktoken.get_encoding(name)
        except OSError as error:  # which the exceptions of `requests` are, too
            raise OSError(f"tokenizer {name} needs the network once, which failed ({type(error).__name__}): go online, "
                          "set TIKTOKEN_CACHE_DIR to a folder that has it, or take --tokenizer bytes") from None
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": len(ranks)})


def store_bpe(texts, size, folder):
    """Trains a byte-level BPE of `size` ids on an iterator of texts; `load_tokenizer("bpe", folder)` then has it."""
    import rustbpe
    bpe = rustbpe.Tokenizer()
    bpe.train_from_iterator(texts, vocab_size=size - 1)  # <|endoftext|> is the last id
    # tiktoken's own file format, but it has no place for the pattern that splits text into words: meta.json keeps that
    lines = [base64.b64encode(bytes(token)) + b" %d\n" % rank for token, rank in bpe.get_mergeable_ranks()]
    if len(lines) < size - 1:
        print(f"note: the text has no more pairs to join: {len(lines) + 1} ids rather than {size}")
    (folder / "tokenizer.tiktoken").write_bytes(b"".join(lines))
    (folder / "meta.json").write_text(json.dumps({"pattern": bpe.get_pattern()}), encoding="utf-8")


GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # ByteLevel's own


def hf_bytes():
    """{byte: the printable character that stands for it in GPT-2's vocabulary, and in all byte-level ones since}."""
    others = itertools.count(256)  # for white space and control characters
    return {byte: chr(byte if chr(byte).isprintable() and byte != 32 else next(others)) for byte in range(256)}


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
    config = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    return {"tokenizer.json": content, "tokenizer_config.json": config}


def read_hf_tokenizer(folder):
    """The tiktoken.Encoding of a byte-level BPE in Hugging Face's form, as GPT-2's, Llama 3's, Qwen's and ours are.

    What a tokenizer does before it splits (Qwen's Unicode NFC) is left out: it changes decomposed letters alone.
    """
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        model, before = content["model"], content["pre_tokenizer"] or {}
        parts = {part.get("type"): part for part in before.get("pretokenizers", [before])}
        require(model["type"] == "BPE" and "ByteLevel" in parts, model["type"])
        pattern = parts["Split"]["pattern"]["Regex"] if "Split" in parts else GPT2_PATTERN
        special = {token["content"]: token["id"] for token in content["added_tokens"]}
        if "<|endoftext|>" not in special:  # Llama's has another name
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            special["<|endoftext|>"] = special[config["eos_token"]]
        letters = str.maketrans({letter: chr(byte) for byte, letter in hf_bytes().items()})
        ranks = {word.translate(letters).encode("latin-1"): rank for word, rank in model["vocab"].items()
                 if word not in special}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}/tokenizer.json is no byte-level BPE, as tiktoken's all are: {error!r}") from None
    return tiktoken.Encoding(os.path.abspath(folder), pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


# ---- sources -> documents --------------------------------------------------------------------------------------------
# A source is the `Path` of a file, or "hf:...". A document is a tuple of what follows each other in it: (text,), where
# text is a `str` or the `Path` of a file, which may be larger than memory; or for fine-tuning (prompt, response).


def find_files(sources):
    """The files behind `sources`, in a fixed order; "-" and "hf:..." stay as they are.

    None are the embedded default, the standard library: real code of several megabytes that every reader has.
    FileNotFoundError or ValueError for a source that is missing or no text: known before an hour of others is read.
    """
    if not sources:
        skip = {"test", "tests", "idlelib", "site-packages", "__pycache__"}
        return [path for path in walk(os.path.dirname(os.__file__), skip) if path.suffix == ".py"]
    files = []
    for source in sources:
        named = source == "-" or str(source).startswith("hf:")
        if not (named or os.path.isdir(source) or os.path.isfile(source)):
            raise FileNotFoundError(f"{source} is neither a file nor a folder (nor hf:NAME, nor - for standard input)")
        inside = walk(source) if os.path.isdir(source) else [source]
        require(inside, f"{source} is empty, expected text")
        texts = [file for file in inside if named or is_text(file)]
        require(texts, f"{source} holds no text in UTF-8, and is no .jsonl, .jsonl.gz or .parquet: convert it, as by "
                       "pdftotext, unzip, gunzip, iconv -f utf-16 -t utf-8, or a spreadsheet's export to CSV")
        if left_out := sorted(set(inside).difference(texts)):
            print(f"{source}: {len(texts)} text files; left out are {len(left_out)} others, such as {left_out[0]}")
        files += texts
    return files


def walk(root, skip=()):
    """The files in and below `root`, sorted by path, without hidden ones (.git is no prose) and folders to skip."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in skip]  # os.walk goes into these
        files += [Path(folder, name) for name in names if name[0] != "."]
    return sorted(files)


def is_text(source):
    """Whether a file is text: no NUL in its first 8 KB (as git tells it) and no PDF; tables count, even compressed."""
    if not os.path.isfile(source):  # a broken link, a pipe
        return False
    head = np.fromfile(source, np.uint8, 8192).tobytes()
    return is_table(source) or b"\0" not in head and not head.startswith(b"%PDF-")


def is_table(source):
    """Whether each row is a document, by the name: what `open_table` knows."""
    return str(source).startswith("hf:") or str(source).endswith((".jsonl", ".jsonl.gz", ".parquet"))


def open_table(source):
    """The rows of a table, dicts, one after another; those of hf:... are streamed."""
    name = str(source)
    if name.startswith("hf:"):
        found = re.fullmatch(r"hf:([^/:]+(?:/[^/:]+)?)(?:/([^/:]+))?(?::(.+))?", name)
        require(found, "expected hf:NAME[/CONFIG][:SPLIT], as in hf:HuggingFaceFW/fineweb-edu/sample-10BT:train")
        from datasets import load_dataset
        yield from load_dataset(*filter(None, found.group(1, 2)), split=found[3] or "train", streaming=True)
    elif name.endswith(".parquet"):
        import pyarrow.parquet
        for batch in pyarrow.parquet.ParquetFile(name).iter_batches(1024):
            yield from batch.to_pylist()
    else:
        with (gzip.open if name.endswith(".gz") else open)(name, "rt", encoding="utf-8-sig", errors="replace") as lines:
            yield from map(json.loads, filter(str.strip, lines))


def read_table(source, key):
    """Yields the texts under `key`, row by row; ValueError names the row that has none or cannot be read."""
    number = 1
    try:
        for row in open_table(source):
            text = row.get(key) if isinstance(row, dict) else None
            if not isinstance(text, str):
                kind = "absent, or null" if text is None else f"of type {type(text).__name__}"
                raise ValueError(f"{key} (--text_key, --prompt_key, --response_key) is {kind}, expected a string, in "
                                 f"{str(row)[:200]}")
            # JSON can hold half a character (\ud800), which no tokenizer takes: it becomes "?"
            yield text.encode("utf-8", "replace").decode("utf-8")
            number += 1
    except (ValueError, OSError, RuntimeError, EOFError, zlib.error) as error:  # no JSON, a cut file, no network
        # pyarrow and datasets explain themselves in many lines
        why = f"no JSON, {error.msg}" if isinstance(error, json.JSONDecodeError) else " ".join(str(error).split())
        raise ValueError(f"{source}, row {number}: {why}") from None


def read_documents(files, keys):
    """Yields the documents of `files` in order, without empty ones (an empty response has nothing to learn)."""
    for file in files:
        if is_table(file):
            yield from (texts for texts in zip(*[read_table(file, key) for key in keys]) if texts[-1])
        elif os.path.getsize(file):
            yield (Path(file),)


# ---- documents -> tokens --------------------------------------------------------------------------------------------

PIECE = 1 << 18  # characters; a run of a million spaces makes tiktoken's regular expressions panic or return nothing
BATCH = 8  # pieces a thread gets at once: handing over single short rows would cost as much as their tokens


def pieces(text):
    """Yields a text (`str`, or `Path`) in pieces of less than 2 PIECE characters; what is not UTF-8 becomes U+FFFD.

    A piece ends between a letter or digit and white space. The patterns of all tiktoken's encodings split there in any
    context, so the pieces' tokens are the whole's. (After a newline they do not: several newlines may be one token, and
    cl100k_base has tokens like ".\\n".) Text without such a place is cut anywhere, which costs a token or two.
    """
    # -sig: without a byte order mark; newline: "\r\n" stays as it is
    utf8 = {"encoding": "utf-8-sig", "errors": "replace", "newline": ""}
    with open(text, **utf8) if isinstance(text, Path) else io.StringIO(text, newline="") as file:
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
    """Yields (split, number, is prompt, text); number is the document's, from 1, where the split begins it, else 0.

    Validation is every k-th document, k = 1 / val_fraction. Fewer than k documents are read twice: their characters are
    counted, then cut, for a share of few documents would be far off. The one on the border has a part in each split.
    A prompt and its response are never cut: of few, the last one validates.
    """
    every = round(1 / val_fraction) if val_fraction else 0
    documents = iter(documents)
    head = list(itertools.islice(documents, every))
    if head and len(head[0]) > 1:
        every = len(head)
    if few := len(head) < every:  # characters left to the training split: what comes after them validates
        left = int(sum(len(text) for document in head for text in pieces(*document)) * (1 - val_fraction))
    begun = {}  # split -> the last document that it has a part of
    for number, document in enumerate(itertools.chain(head, documents), 1):
        if not few:
            left = 0 if every and number % every == 0 else sys.maxsize  # a whole document for one of the splits
        for turn, whole in enumerate(document, 1):
            for text in pieces(whole):
                for split, part in (("train", text[:left]), ("val", text[left:])):
                    if part:
                        yield split, number if begun.get(split) != number else 0, turn < len(document), part
                        begun[split] = number
                left = max(0, left - len(text))
    # Nothing follows the last response, and it has an end, too.
    yield from ((split, number, False, "") for split in begun if len(document) > 1)


def encode(encoding, entries):
    """Entries of `split_corpus` -> {split: uint32 (2, n)}: its ids, and 1 where they are targets, else 0.

    <|endoftext|> goes before each document, as in llm.c; within one it is thirteen characters like others. A prompt's
    tokens are no targets. That <|endoftext|> always is one: it is what the document before has to end with.
    """
    found = {split: [np.empty((2, 0), np.uint32)] for split in ("train", "val")}
    for split, number, prompt, text in entries:
        if number:
            found[split].append(np.uint32([[encoding.eot_token], [1]]))
        # bytes are their own ids, which is a hundred times as fast; while tiktoken encodes, the other threads go on
        ids = (np.frombuffer(text.encode(), np.uint8) if encoding.name == "bytes" else
               encoding.encode_to_numpy(text, disallowed_special=()))
        found[split].append([ids, np.full(len(ids), not prompt)])
    return {split: np.concatenate(parts, axis=1) for split, parts in found.items()}


# ---- tokens -> shards ------------------------------------------------------------------------------------------------

# llm.c's (magic, version) -> token type, and what such a file means if no meta.json says more: ids of GPT-2, Llama 3.
# The third is ours: train_000000.mask beside train_000000.bin has a byte for each of its tokens, 1 for targets, else 0.
FORMATS = {(20240520, 1): "<u2", (20240801, 7): "<u4", (20240520, 100): "u1"}
LLM_C = {"<u2": {"tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256},
         "<u4": {"tokenizer": None, "vocab_size": 128256, "eot": 128001}}
HEADERLESS = ('nanoGPT\'s files need a meta.json like {"header": false, "tokenizer": "gpt2", "vocab_size": 50257}, or, '
              'beside a meta.pkl, with "tokenizer": null and the vocab_size in it')
HEADER = 256 * 4  # bytes: 256 int32, of which magic, version and number of tokens are used
# The types that these entries of meta.json must have; null is as good as none.
META = dict(header=bool, tokenizer=str, vocab_size=int, eot=int, train_tokens=int, val_tokens=int, val_bytes=int)


def prepare(sources, out, **options):
    """Tokenizes `sources` (none: the standard library) into shards and meta.json in the new folder `out`; returns meta.

    `options` are fields of DataConfig. What can be known is checked before the corpus is read. ValueError or OSError
    leave nothing written; FileExistsError if `out` exists, OSError if another process finished it first.
    """
    config = DataConfig(sources, str(out), **options)
    keys = [config.prompt_key, config.response_key] if config.prompt_key else [config.text_key]
    out = Path(out).resolve()  # a link may lead to another disk, and `stage` has to be on the same one
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is left as it is: choose another --out")
    files = find_files(sources)
    require(not config.prompt_key or all(map(is_table, files)), "--prompt_key needs rows: .jsonl[.gz], .parquet or hf:")
    for file, key in itertools.product(filter(is_table, files), keys):
        next(read_table(file, key), None)  # a missing package, key or network shows with the first row
    for other in out.parent.glob(f".{out.name}.*"):
        print(f"{other} is of a preparation that still runs, or was killed: then remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    # written beside `out` and renamed in one step when complete; a name of its own, so that two processes cannot mix
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as stage:
        if "-" in files:
            Path(stage, "stdin").write_bytes(sys.stdin.buffer.read())  # a file, for it is read twice
            files = [Path(stage, "stdin") if file == "-" else file for file in files]

        def corpus():
            return split_corpus(read_documents(files, keys), config.val_fraction)

        whole = Path(stage, "whole")  # the data set; what else is in `stage` goes with it
        whole.mkdir()
        if config.train_bpe:
            store_bpe((text for split, *_, text in corpus() if split == "train"), config.train_bpe, whole)
        meta = tokenize(corpus(), whole, config)
        whole.rename(out)
    return meta


def tokenize(corpus, folder, config):
    """Writes shards of both splits and meta.json into `folder`, with a progress bar on a terminal; returns meta."""
    encoding = load_tokenizer("bpe" if config.train_bpe else config.tokenizer, folder)
    dtype = np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")  # a uint16 would silently turn 65,536 into 0
    meta = {**read_meta(folder), "tokenizer": encoding.name, "vocab_size": encoding.n_vocab, "eot": encoding.eot_token,
            "dtype": dtype.name, "train_tokens": 0, "val_tokens": 0, "train_bytes": 0, "val_bytes": 0, "documents": 0}
    threads, unreadable = config.workers or os.cpu_count(), 0
    with ThreadPoolExecutor(threads) as pool, tqdm(unit=" tokens", unit_scale=True, disable=None) as bar:
        batches = iter(lambda: list(itertools.islice(corpus, BATCH)), [])
        tasks = ((entries, pool.submit(encode, encoding, entries)) for entries in batches)
        ahead = list(itertools.islice(tasks, 2 * threads))  # no more of them, so memory stays flat
        while ahead:
            entries, task = ahead.pop(0)
            for split, number, _, text in entries:
                meta[f"{split}_bytes"] += len(text.encode())
                unreadable += text.count("\ufffd")
                meta["documents"] = max(meta["documents"], number)
            for split, (ids, targets) in task.result().items():
                append(folder / split, ids.astype(dtype), meta[f"{split}_tokens"], config.shard_tokens)
                if config.prompt_key:
                    append(folder / split, targets.astype("u1"), meta[f"{split}_tokens"], config.shard_tokens, "mask")
                meta[f"{split}_tokens"] += len(ids)
                bar.update(len(ids))
            ahead.extend(itertools.islice(tasks, 1))
    for split, share, size in (("train", 1, meta["train_tokens"]), ("val", config.val_fraction, meta["val_tokens"])):
        require(not share or size > 2, f"the sources hold {size} {split} tokens, expected at least 3: give more text")
    if unreadable:
        print(f"note: {unreadable:,} x U+FFFD, in place of what is no UTF-8: convert it (iconv -f latin1 -t utf-8) and "
              "prepare it again, in a new --out")
    if config.prompt_key:  # a loss of responses alone has no bits per byte of all the text
        meta |= {"prompt_key": config.prompt_key, "response_key": config.response_key, "val_bytes": None}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return meta


def append(name, ids, total, limit, suffix="bin"):
    """Adds ids to the shards name_000000.bin, ..., which hold `total` tokens so far and at most `limit` each."""
    magic, version = next(key for key, dtype in FORMATS.items() if dtype == ids.dtype)
    while len(ids):
        shard, filled = divmod(total, limit)
        part, ids = np.split(ids, [limit - filled])
        with open(f"{name}_{shard:06d}.{suffix}", "r+b" if filled else "wb") as file:
            file.write(np.array([magic, version, filled + len(part)], "<i4").tobytes())
            file.seek(HEADER + filled * part.itemsize)  # what a new file skips here reads as zeros
            file.write(part.tobytes())
        total += len(part)


def read_meta(folder):
    """meta.json of a data set as a dict, empty if there is none; ValueError for what it cannot hold."""
    path = Path(folder, "meta.json")
    try:
        meta = dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
        for key, kind in META.items():
            require(type(meta.get(key)) in (kind, type(None)), f"{key} is {meta.get(key)!r}, expected {kind.__name__}")
        return meta
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not the JSON that describes data: {error}") from None


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
    each window once. ds.fixed(i) is window i in file order, for evaluation. In both y is -100 where a mask beside the
    shards says that a token is no target. `tokens` is the split's size, `meta` what is known of it (tokenizer: None if
    tiktoken cannot decode the ids). `"header": false` in meta.json reads nanoGPT's plain uint16 files. Opening reads
    the headers and one window. FileNotFoundError without shards, ValueError for damaged or too short ones; DataError
    from a window that has ids beyond the vocabulary.
    """

    def __init__(self, folder, split, seq_len, seed=0):
        self.seq_len, self.seed, meta, paths = seq_len, seed, read_meta(folder), find_shards(Path(folder), split)
        header = meta.get("header") is not False
        self.shards = [open_shard(path, header) for path in paths]
        self.meta = (LLM_C[self.shards[0][1]] if header else dict.fromkeys(("tokenizer", "vocab_size", "eot"))) | meta
        vocab, counts = self.meta["vocab_size"], [tokens for *_, tokens in self.shards]
        # nanoGPT has it in meta.pkl, but reading a pickle can run code
        require((vocab or 0) > 0, f"{folder} does not tell its vocabulary: vocab_size is {vocab}; {HEADERLESS}")
        eot = meta.get("eot") or 0
        require(0 <= eot < vocab, f"{folder}: eot is {eot}, expected an id below vocab_size {vocab}")
        self.tokens, said = sum(counts), meta.get(f"{split}_tokens")
        require(said in (None, self.tokens), f"{folder} has {self.tokens} {split} tokens, meta.json says {said}")
        masked = meta.get("response_key") or any(Path(folder).glob("*.mask"))
        self.masks = [open_shard(path.with_suffix(".mask")) for path in paths if masked]
        lengths = [tokens for *_, tokens in self.masks or self.shards]
        require(lengths == counts, f"{folder} has masks of other lengths than its {split} shards: damaged")
        # windows before each shard, and in all; none reaches into the next one, whose text is another
        *self.starts, self.windows = itertools.accumulate((max(0, n - 1) // seq_len for n in counts), initial=0)
        require(self.windows, f"the longest {split} shard of {folder} has {max(counts):,} tokens, --seq_len {seq_len} "
                              f"needs {seq_len + 1:,}: give more text or a shorter --seq_len")
        map_shard.cache_clear()  # a file that was written again would still have its old content there
        self.fixed(0)  # ids of another vocabulary show here, before the first step

    def __getitem__(self, i):
        return tuple(part[0] for part in self.__getitems__([i]))

    def __getitems__(self, indices):
        """What DataLoader calls for a whole micro-batch: x and y, int64 (B, T)."""
        places = []
        for i in indices:
            epoch, i = divmod(i, self.windows)
            key = mix(self.seed, epoch)
            places.append(self.place(permute(i, self.windows, key), key if epoch else 0))
        return self.read(places)

    def fixed(self, i):
        """(x, y), int64 (T,), of window i in file order, 0 <= i < windows."""
        # range: an i beyond the last window is an IndexError, no window of another shard
        return tuple(part[0] for part in self.read([self.place(range(self.windows)[i])]))

    def place(self, window, key=0):
        """(shard, slice of its tokens). A key moves all windows of a shard by up to T - 1 tokens, so that each epoch
        cuts the text elsewhere; their number stays, for the last one is held within the shard."""
        shard = bisect.bisect(self.starts, window) - 1
        phase = mix(key, shard) % self.seq_len if key else 0
        start = min((window - self.starts[shard]) * self.seq_len + phase, self.shards[shard][3] - 1 - self.seq_len)
        return shard, slice(start, start + self.seq_len + 1)

    def read(self, places):
        """x and y, int64 (B, T), of `places`."""
        rows = np.stack([map_shard(*self.shards[shard])[window] for shard, window in places])  # (B, T + 1)
        if rows.max() >= self.meta["vocab_size"]:  # found here, it has a file's name; on a GPU it would be an assertion
            path = self.shards[places[rows.max(axis=1).argmax()][0]][0]
            raise DataError(f"{path} has the id {rows.max():,}, beyond its vocabulary of {self.meta['vocab_size']:,}")
        x, y = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        if self.masks:
            y[np.stack([map_shard(*self.masks[shard])[window] for shard, window in places])[:, 1:] == 0] = -100
        return torch.from_numpy(x), torch.from_numpy(y)


class DataError(ValueError):
    """A window holds ids beyond the vocabulary, which only reading it can tell, perhaps after many steps."""


def find_shards(folder, split):
    """The files of a split in their order; FileNotFoundError says how to make them, or where else there are some."""
    # the last word of these decides: interval_train.bin is no validation
    name = re.compile(rf"(.*[^a-z])?{split}[^a-z](?!(.*[^a-z])?(train|val)[^a-z]).*")
    if paths := sorted(path for path in folder.glob("*.bin") if name.fullmatch(path.name)):
        return paths
    if folder.is_file() and folder.suffix == ".bin":
        what = f"is no folder, expected the one that has such files: {folder.parent}"
    elif any(folder.glob("*.bin")) or Path(folder, "meta.json").exists():
        what = f"has no *{split}*.bin: prepare its source again, with --val_fraction above 0"
    elif folder.exists():  # text, or a folder of it, cannot be made a data set where it is
        what = f"has no *{split}*.bin: python data.py {shlex.quote(str(folder))} --out data/mine prepares one"
    else:
        what = f"does not exist: python data.py SOURCE --out {shlex.quote(str(folder))} prepares one"
    places = {folder if folder.exists() else folder.parent, Path("data")}
    near = [str(path.parent) for place in places for path in place.glob("*/meta.json")]
    raise FileNotFoundError(f"{folder} {what}" + f"; there are {', '.join(near)}" * bool(near))


def open_shard(path, header=True):
    """(path, token type, offset in bytes, tokens) of a shard; ValueError if the file is not what its header says."""
    size, dtype, offset = path.stat().st_size, "<u2", 0
    tokens = size // 2
    if header:
        magic, version, tokens = [*np.fromfile(path, "<i4", 3).tolist(), 0, 0, 0][:3]
        require((magic, version) in FORMATS, f"{path}: magic, version are {magic, version}, for llm.c's header "
                                             f"{[*FORMATS][:2]}; {HEADERLESS}")
        dtype, offset = FORMATS[magic, version], HEADER
    expected = offset + tokens * np.dtype(dtype).itemsize
    require(size == expected, f"{path} has {size:,} bytes, but {expected:,} by its {tokens:,} tokens: damaged")
    return path, dtype, offset, tokens


@functools.lru_cache(256)  # a map holds its file open, and systems allow 1,024: 10^12 tokens are 10,000 shards
def map_shard(path, dtype, offset, tokens):
    """A shard's tokens, on disk until they are read; as a plain array, whose slices cost a third of an np.memmap's."""
    return np.memmap(path, dtype, "r", offset, (tokens,)).view(np.ndarray)


def leave_group(worker):
    """Put a reading process into a group of its own: Ctrl-C would end it before the run's last step has its batch."""
    if hasattr(os, "setpgid"):  # Windows has none
        os.setpgid(0, 0)


def batches(dataset, step, batch_size, micro_batch, rank=0, world=1, device="cpu", workers=None):
    """Endless iterator of (x, y), int64 (micro_batch, T) on `device`, from the first micro-batch of `step` on.

    Step s is windows [s * batch_size, (s + 1) * batch_size) of the stream whatever the layout; ranks and micro-steps
    only divide it. `dataset` is a TokenDataset, or has its `__getitems__` (train.py also asks for `fixed`, `windows`,
    `tokens` and `meta`). `batch_size` is global, in windows a step.
    `workers`: processes that read ahead, None for two beside a GPU and none on a CPU, where this process reads faster
    than they deliver.
    """
    cuda = torch.device(device).type == "cuda"
    share = batch_size // world  # consecutive, so that the ranks' shares one after another are the global batch
    shares = itertools.count(step * batch_size + rank * share, batch_size)
    indices = (range(i, i + micro_batch) for first in shares for i in range(first, first + share, micro_batch))
    loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=indices, collate_fn=tuple,  # (x, y) as it is
        num_workers=2 * cuda if workers is None else workers, pin_memory=cuda, worker_init_fn=leave_group,
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
    workers: Annotated[int, "tokenizer threads; 0: one per core"] = 0
    text_key: Annotated[str, "the field of .jsonl, .parquet and hf: rows that is the text"] = "text"
    prompt_key: Annotated[str, "for fine-tuning: the field that is read but not learned"] = ""
    response_key: Annotated[str, "for fine-tuning: the field that is learned, as what follows the prompt"] = ""
    train_bpe: Annotated[int, "train a tokenizer of so many ids on the training split and use it"] = 0

    def __post_init__(self):
        """Refuse what cannot work, ValueError; OSError if the tokenizer has to be downloaded and cannot be."""
        for name, low, high in (("val_fraction", 0.0001, 0.5), ("workers", 1, 1024), ("train_bpe", 257, 1 << 24)):
            value = getattr(self, name)
            require(value == 0 or low <= value <= high, f"--{name} is {value}, expected {low} to {high}, or 0")
        # what a header can hold
        require(1 <= self.shard_tokens < 1 << 31, f"--shard_tokens is {self.shard_tokens}, expected 1 to 2147483647")
        require(not self.train_bpe or self.tokenizer == "bytes", f"drop --train_bpe or --tokenizer {self.tokenizer}")
        require(self.out, "--out is empty, expected a new folder")
        require(not self.sources or self.out != DataConfig.out, "--out is missing: name a folder, as --out data/mine")
        require(bool(self.prompt_key) == bool(self.response_key), "--prompt_key and --response_key go together")
        require(not self.prompt_key or self.text_key == "text", "--text_key has no effect with --prompt_key: drop one")
        load_tokenizer(self.tokenizer)  # for its error alone: the file it may need is cached from here on


def main():
    """`python data.py`: prepares a data set and says what to type next."""
    from train import command  # here alone: everything above can be lifted into another project as it is

    with command(DataConfig, "data.py") as config:
        meta = prepare(**vars(config))
        inside = Path(config.out).resolve().parent == Path("out").resolve()
        run = shlex.quote(str(Path("out", Path(config.out).name + "-run" * inside)))
        print(f"{config.out}: {meta['train_tokens']:,} train and {meta['val_tokens']:,} val tokens "
              f"({meta['tokenizer']}, {meta['vocab_size']:,} ids)")
        print(f"next: python train.py --data {shlex.quote(config.out)} --out {run}" if meta["val_tokens"] else
              "train.py needs a validation split, too: --val_fraction above 0")
        if config.prompt_key:
            print("to fine-tune, add --init_from and a folder with a model in Hugging Face's form")


if __name__ == "__main__":
    main()
