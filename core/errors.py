"""The exceptions of branchline: one base class, small families.

Every error is built from three parts, so that none can be raised without them: the thing it is
about, the reason, and what to do.
"""

from __future__ import annotations


class BranchlineError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        subject: the thing that failed, by name ("adapter 'sql'").
        reason: why, naming both sides ("has rank 64 but slots were sized for 16").
        remedy: what to do about it ("load with max_lora_rank >= 64").
    """

    def __init__(self, subject: str, reason: str, remedy: str) -> None:
        super().__init__(subject, reason, remedy)
        self.subject = subject
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.subject}: {self.reason}; {self.remedy}"


class ConfigError(BranchlineError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class RefusedAttributeError(ConfigError, AttributeError):
    """A method that transformers or PEFT models have, and that a served model cannot have."""


class CalibrationError(ConfigError):
    """Calibration data or saved input scales that are missing, unusable or of another model."""


class ScaleError(BranchlineError, ValueError):
    """A quantisation scale that is absent, non-positive, not finite or of the wrong shape."""


class CheckpointError(BranchlineError, ValueError):
    """A quantised checkpoint that contradicts itself, is incomplete or of an unserved format."""


class WrapError(BranchlineError):
    """A model, or a part of one, that cannot be wrapped."""


class RemoteAuditError(BranchlineError):
    """A server whose audit cannot be had."""


class ContractError(BranchlineError, TypeError):
    """The contract between producers and consumers was broken."""


class RawConsumerError(ContractError):
    """Something that reads the raw activation was handed quantised codes (I1)."""


class QuantKeyMismatchError(ContractError):
    """Codes were quantised for another `QuantKey` than the one their consumer declares."""


class MalformedActivationError(ContractError):
    """Codes, scales and key of a `QuantizedActivation` do not fit each other."""


class KernelUnavailableError(BranchlineError, RuntimeError):
    """A kernel was forced, or is the only choice, and cannot run here (I14)."""


class RegistryError(BranchlineError, ValueError):
    """A registration that breaks the rules of a registry: no predicate, or a name taken twice."""


class BatchError(BranchlineError, ValueError):
    """The rows named for a batch do not fit the batch, or are used outside of one."""


class RankError(BranchlineError, RuntimeError):
    """The ranks of a tensor-parallel replica did not do the same, or one of them alone failed."""


class AdapterError(BranchlineError):
    """Base of what can go wrong with one adapter."""


class AdapterNotFoundError(AdapterError, LookupError):
    """No adapter of that name is loaded, or no folder lies at that path."""


class AdapterExistsError(AdapterError, ValueError):
    """The name is taken."""


class AdapterFormatError(AdapterError, ValueError):
    """The files are damaged, incomplete or of another tool."""


class AdapterUnsupportedError(AdapterError, ValueError):
    """A well-formed adapter that uses a feature which is not served."""


class AdapterMismatchError(AdapterError, ValueError):
    """A well-formed adapter for another base model: names, shapes or task do not fit."""


class AdapterCapacityError(AdapterError, RuntimeError):
    """The adapter does not fit the configured slots: too many adapters, or too high a rank."""


class AdapterSourceError(AdapterError, ValueError):
    """Where the adapter was to come from is not allowed, not reachable, or beyond its limits."""


class AdapterBrokenError(AdapterError, RuntimeError):
    """The adapter's source is gone, damaged or changed; reload the adapter, or unload it."""


class AdapterBusyError(AdapterError, RuntimeError):
    """Batches in flight still use the adapter, longer than the caller would wait."""


class EngineError(BranchlineError, RuntimeError):
    """Base of what can go wrong with the engine, or with one request in it."""


class EngineStoppedError(EngineError):
    """The engine is stopping, has stopped, or its thread died."""


class RequestFailedError(EngineError):
    """One request failed in its forward; others go on."""


class NonFiniteError(RequestFailedError):
    """A request's logits hold NaN or infinity: its adapter overflows, or the base model does."""


class RequestTooLongError(BranchlineError, ValueError):
    """A prompt (with its answer) that is longer than the model or the cache holds."""
