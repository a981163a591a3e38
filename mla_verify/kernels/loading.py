"""Kernels from outside: a function or class in a file, or one that an installed package registers."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mla_verify.errors import UsageError, did_you_mean
from mla_verify.kernels.contract import Contract, Kernel, KernelBase
from mla_verify.kernels.interpreter import ENVIRONMENT, wrong_dtype

if TYPE_CHECKING:
    from mla_verify.tensors import MLAInputs, MLAOutput

_SIGNATURE = "it must take (inputs, out) and return MLAOutput: see examples/my_kernel.py"


def is_file_kernel(name: str) -> bool:
    """Whether a kernel's name is "path/to/file.py:function"."""
    path, colon, function = name.rpartition(":")
    return bool(colon) and path.endswith(".py") and bool(function)


class FunctionKernel(KernelBase):
    """A function as a kernel, with the contract that it carries, or with one that claims everything."""

    def __init__(self, name: str, function: Any, module: ModuleType, version: str) -> None:
        self.name = name
        self.contract: Contract = getattr(function, "contract", None) or Contract()
        self._function = function
        self._uses_triton = _uses_triton(module)
        self._version = version

    def own_process(self, device: str) -> Mapping[str, str] | None:
        return _isolated(device)

    def why_not_dtype(self, dtype: str, device: str) -> str | None:
        return wrong_dtype(dtype) if device == "cpu" and self._uses_triton else None

    def version(self) -> str:
        return self._version

    def run(self, inputs: MLAInputs, out: MLAOutput) -> MLAOutput:
        result: MLAOutput = self._function(inputs, out)
        return result

    def ran(self) -> str:
        return str(self._function.__qualname__)


def load_file_kernel(name: str) -> Kernel:
    """The kernel of "path/to/file.py:function". Raises UsageError when that is none."""
    path_text, _, attribute = name.rpartition(":")
    path = Path(path_text)
    if not path.is_file():
        raise UsageError(f"--kernel {name}: there is no file {path}", "give path/to/file.py:function")
    module, digest = _run_file(path.resolve())
    return _kernel_of(name, module, attribute, f"{path.name} sha256 {digest[:12]}")


def as_kernel(name: str, value: str) -> Kernel:
    """The kernel of an entry point, "module:object". Raises UsageError when that is none."""
    module_name, _, attribute = value.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        hint = "mend or uninstall the package that registers it"
        raise UsageError(f"kernel {name} ({value}) does not import: {type(error).__name__}: {error}", hint) from error
    version = f"{module_name} {getattr(sys.modules[module_name.partition('.')[0]], '__version__', 'of no version')}"
    return _kernel_of(name, module, attribute, version)


@lru_cache
def _run_file(path: Path) -> tuple[ModuleType, str]:
    """The file as a module, and its SHA-256."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{digest[:8]}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # Triton and dataclasses look their module up
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # its neighbours, as `python file.py` finds them; last, so that they replace nothing
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UsageError(f"{path} does not parse: line {error.lineno}: {error.msg}", "mend the file") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from error
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        where = f" (line {lines[-1]})" if lines else ""
        message = f"{path} does not import: {type(error).__name__}: {error}{where}"
        raise UsageError(message, "the file must import without arguments and without running the kernel") from error
    return module, digest


def _kernel_of(name: str, module: ModuleType, attribute: str, version: str) -> Kernel:
    found = getattr(module, attribute, None)
    if found is None:
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        hint = did_you_mean(attribute, known, f"it has {', '.join(known) or 'no function'}")
        raise UsageError(f"kernel {name}: {module.__file__} has no {attribute!r}", hint)
    if isinstance(found, type):
        return _instance(name, found)
    if not callable(found):
        raise UsageError(f"kernel {name}: {attribute} is {type(found).__name__}, no function", _SIGNATURE)
    signature = inspect.signature(found)
    try:
        signature.bind(object(), object())
    except TypeError as error:
        raise UsageError(f"kernel {name}: its signature is {attribute}{signature}", _SIGNATURE) from error
    contract = getattr(found, "contract", None)
    if contract is not None and not isinstance(contract, Contract):
        hint = "@mla_kernel(Contract(...)), from mla_verify.kernels"
        raise UsageError(f"kernel {name}: its contract is {type(contract).__name__}", hint)
    return FunctionKernel(name, found, module, version)


def _instance(name: str, found: type) -> Kernel:
    has_contract = isinstance(getattr(found, "contract", None), Contract)
    if not (issubclass(found, KernelBase) and has_contract and callable(getattr(found, "run", None))):
        hint = "derive it from mla_verify.kernels.KernelBase, with a `contract` and `run`; or name a function"
        raise UsageError(f"kernel {name}: class {found.__name__} is no kernel", hint)
    kernel: Any = found()
    kernel.name = name
    if found.own_process is KernelBase.own_process:
        kernel.own_process = _isolated
    return kernel  # type: ignore[no-any-return]


def _isolated(device: str) -> Mapping[str, str]:
    """Whatever a kernel from outside does, in a process of its own it takes nothing else down with it."""
    return ENVIRONMENT if device == "cpu" else {}


def _uses_triton(module: ModuleType) -> bool:
    """Whether triton, or something made by it, is among the module's names."""
    for value in vars(module).values():
        origin = value.__name__ if isinstance(value, ModuleType) else type(value).__module__
        if origin.partition(".")[0] == "triton":
            return True
    return False
