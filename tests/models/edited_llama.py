"""Llama under another name, of transformers' own source with edits: what a library with a new architecture brings."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PACKAGE = "drover_models"


@contextmanager
def registered(folder: Path, edit: Callable[[str], str]) -> Iterator[ModuleType]:
    """Write the package, register it with transformers as any library may, and give its modeling module.

    `edit` gets each source file with "Llama" replaced by "Drover" and absolute imports.
    """
    package = folder / PACKAGE
    package.mkdir()
    llama = Path(transformers.models.llama.__file__).parent
    (package / "__init__.py").write_text("")
    for kind in ("configuration", "modeling"):
        source = (llama / f"{kind}_llama.py").read_text()
        source = re.sub(
            r"^from \.\.\.(\w*)", lambda m: f"from transformers{'.' * bool(m[1])}{m[1]}", source, flags=re.M
        )
        source = re.sub(r"\bLlama(?=[A-Z])", "Drover", source)
        source = source.replace('"llama"', '"drover"').replace("configuration_llama", "configuration_drover")
        (package / f"{kind}_drover.py").write_text(edit(source))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        configuration = importlib.import_module(f"{PACKAGE}.configuration_drover")
        modeling = importlib.import_module(f"{PACKAGE}.modeling_drover")
        transformers.AutoConfig.register("drover", configuration.DroverConfig)
        transformers.AutoModelForCausalLM.register(configuration.DroverConfig, modeling.DroverForCausalLM)
        yield modeling
    finally:
        sys.path.remove(str(folder))
        CONFIG_MAPPING._extra_content.pop("drover", None)
        known = transformers.AutoModelForCausalLM._model_mapping._extra_content
        for config in [config for config in known if config.__name__ == "DroverConfig"]:
            del known[config]
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]
