"""Kernels from outside, in their own process: a function or class in a file, or one that a package registers."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mla_verify.errors import UsageError, did_you_mean
from mla_verify.kernels.contract import Contract, FactsTable, Kernel, KernelBase, RoundingFacts
from mla_verify.kernels.interpreter import wrong_dtype
from mla_verify.kernels.outside import Description, is_file_kernel

if TYPE_CHECKING:
    from mla_verify.tensors import MLAInputs, MLAOutput

_SIGNATURE = "it must take (inputs, out) and return MLAOutput: see examples/my_kernel.py"


class FunctionKernel(KernelBase):
    """A function as a kernel, with the contract that it carries, or with one that claims everything."""

    def __init__(self, name: str, function: Any, module: ModuleType, version: str) -> None:
        self.name = name
        self.has_contract = getattr(function, "contract", None) is not None
        self.contract: Contract = function.contract if self.has_contract else Contract()
        self._function = function
        self._uses_triton = _uses_triton(module)
        self._version = version

    def why_not_dtype(self, dtype: str, device: str) -> str | None:
        return wrong_dtype(dtype) if device == "cpu" and self._uses_triton else None

    def version(self) -> str:
        return self._version

    def run(self, inputs: MLAInputs, out: MLAOutput) -> MLAOutput:
        result: MLAOutput = self._function(inputs, out)
        return result

    def ran(self) -> str:
        return str(getattr(self._function, "__qualname__", type(self._function).__name__))


def describe(name: str, device: str) -> Description:
    """What the tool has to know of a kernel. Raises UsageError when there is none of this name, or none that works."""
    kernel = load_here(name)
    table = {}
    for dtype in kernel.contract.dtypes:
        try:
            table[dtype] = kernel.contract.facts(dtype)
        except Exception as error:
            text = f"{error.message}" if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
            hint = error.hint if isinstance(error, UsageError) else "facts must return RoundingFacts for every dtype"
            raise UsageError(f"kernel {name}: its facts({dtype!r}) raised {text}", hint) from error
        if not isinstance(table[dtype], RoundingFacts):
            what = type(table[dtype]).__name__
            raise UsageError(f"kernel {name}: its facts({dtype!r}) is {what}", "it must return RoundingFacts")
    contract = replace(kernel.contract, facts=FactsTable(table))
    has_contract = not isinstance(kernel, FunctionKernel) or kernel.has_contract
    return Description(contract, kernel.version(), kernel.missing(), kernel.own_process(device), has_contract)


@lru_cache
def load_here(name: str) -> Kernel:
    """The kernel itself, imported into this process. Raises UsageError when that is none."""
    from mla_verify.kernels import registered_kernels

    if is_file_kernel(name):
        path_text, _, attribute = name.rpartition(":")
        path = Path(path_text).resolve()
        module, digest = _run_file(path)
        return _kernel_of(name, module, attribute, f"{path.name} sha256 {digest[:12]}")
    point = registered_kernels()[name]
    try:
        module = importlib.import_module(point.module)
    except (Exception, SystemExit) as error:
        hint = "mend or uninstall the package that registers it"
        what = f"{type(error).__name__}: {error}"
        raise UsageError(f"kernel {name} ({point.value}) does not import: {what}", hint) from error
    root = sys.modules[point.module.partition(".")[0]]
    version = f"{point.module} {getattr(root, '__version__', 'of no version')}"
    return _kernel_of(name, module, point.attr, version)


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
        line = f"line {error.lineno}: " if error.lineno else ""
        raise UsageError(f"{error.filename or path} does not parse: {line}{error.msg}", "mend the file") from error
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
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
    _check_signature(name, attribute, found)
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
    try:
        kernel: Any = found()
    except Exception as error:
        hint = "it must be made without arguments, and without running the kernel"
        raise UsageError(f"kernel {name}: {found.__name__}() raised {type(error).__name__}: {error}", hint) from error
    kernel.name = name
    return kernel  # type: ignore[no-any-return]


def _check_signature(name: str, attribute: str, function: Any) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # of a function written in C, which will say so when it is called
    try:
        signature.bind(object(), object())
    except TypeError as error:
        raise UsageError(f"kernel {name}: its signature is {attribute}{signature}", _SIGNATURE) from error


def _uses_triton(module: ModuleType) -> bool:
    """Whether triton, or something made by it, is among the module's names."""
    for value in vars(module).values():
        origin = value.__name__ if isinstance(value, ModuleType) else type(value).__module__
        if origin.partition(".")[0] == "triton":
            return True
    return False
