"""SGLang's `ServerArgs` in every version that `sparrow_sglang.sglang_compat.versions` lists."""

import copy
import dataclasses
import functools
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast, get_type_hints

from sparrow_sglang.sglang_compat.versions import SUPPORTED

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs


class ServerField(NamedTuple):
    kind: Any
    default: Any
    help: str


def attention_backends(server_args: "ServerArgs") -> tuple[str, str]:
    view: Any = resolved(server_args)
    backend = view.attention_backend
    return view.prefill_attention_backend or backend, view.decode_attention_backend or backend


class _Resolved:
    """From 0.5.20 on `ServerArgs` keeps decisions beside what the user gave."""

    def __init__(self, server_args: "ServerArgs") -> None:
        self._server_args = server_args

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.arg_groups.overrides import resolution_result

        if not hasattr(self._server_args, name):
            raise AttributeError(name)
        return resolution_result(self._server_args, name)


def resolved(server_args: "ServerArgs") -> "ServerArgs":
    """The arguments to read: what SGLang has decided on so far, else what the user gave."""
    if hasattr(type(server_args), "resolve_once"):
        return cast("ServerArgs", _Resolved(server_args))
    return server_args


def resolve(server_args: "ServerArgs") -> None:
    """Have SGLang decide on what the user left open, and check; in 0.5.15 `__init__` does it."""
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()


def is_resolved(server_args: "ServerArgs") -> bool:
    """Whether SGLang has resolved `server_args` in this or in the launching process."""
    return getattr(server_args, "_resolution_finished", False)


def resolution_method(cls: Any) -> str:
    """The method of `ServerArgs` in which SGLang decides on what the user left open."""
    return "resolve_once" if hasattr(cls, "resolve_once") else "__post_init__"


def model_config_if_read(server_args: "ServerArgs") -> "ModelConfig | None":
    """The model's config if SGLang has read it; it does not for dummy and remote models."""
    fields = vars(server_args)
    return fields.get("model_config", fields.get("_model_config"))


def read_model_config(server_args: "ServerArgs") -> "ModelConfig":
    if hasattr(server_args, "get_model_config"):
        return server_args.get_model_config()
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(server_args)


def stock_attention_backend(server_args: "ServerArgs", model_config: "ModelConfig") -> str:
    """The attention backend that SGLang's own rules choose for this model and device."""
    from sglang.srt.arg_groups.overrides import collect_model_override_declarations

    record = getattr(server_args, "_server_args", server_args)
    unset: Any = copy.copy(record)
    # A struct's copy has its fields only.
    vars(unset).update(vars(record))
    backends = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    # For pages of several tokens SGLang would choose a backend that can verify trees of drafts.
    undecided = dict.fromkeys((*backends, "speculative_algorithm", "speculative_eagle_topk"))
    for name in undecided:
        _set_field(unset, name, None)
    # What SGLang has resolved since stands above the fields.
    resolved = getattr(record, "_resolved_overrides", None) or ()
    vars(unset)["_resolved_overrides"] = [*resolved, ("sparrow-sglang", undecided)]
    hf_config = model_config.hf_config
    rules = collect_model_override_declarations(hf_config.architectures[0], unset, hf_config)
    chosen = [fields["attention_backend"] for _, fields in rules if "attention_backend" in fields]
    if chosen:
        return str(chosen[-1])
    if hasattr(unset, "_get_default_attn_backend"):
        return str(unset._get_default_attn_backend(False, model_config))
    from sglang.srt.arg_groups.model_override_base import get_default_attn_backend

    return str(get_default_attn_backend(unset, False, model_config))


def _set_field(server_args: Any, name: str, value: Any) -> None:
    """Set a field, also of a record that SGLang has closed."""
    if name in vars(server_args):
        vars(server_args)[name] = value
    else:
        import msgspec

        msgspec.structs.force_setattr(server_args, name, value)


def server_arguments() -> dict[str, type | None]:
    """Names of the fields of `ServerArgs`; int or float for those that take one number."""
    from sglang.srt.server_args import ServerArgs

    return {
        name: next((kind for kind in (int, float) if hint in (kind, kind | None)), None)
        for name, hint in get_type_hints(ServerArgs).items()
    }


def extend_fields_before_import(fields: Mapping[str, ServerField]) -> None:
    """Have SGLang assemble `ServerArgs` with `fields`, too, where it does so while it is imported.
    From 0.5.20 on ServerArgs is a C struct, put together by `collect_input_fields` from one class
    per namespace of the configuration; extension fields go to the end."""
    if find_spec("sglang.srt.arg_groups.fields") is None:
        return
    import msgspec
    from sglang.srt.arg_groups import fields as module

    ours = [(name, Annotated[f.kind, f.help], f.default) for name, f in fields.items()]
    namespace = msgspec.defstruct("SparrowFields", ours, namespace={"_NS_PATH": "exec.attention"})
    original = module.collect_input_fields

    @functools.wraps(original)
    def collect_input_fields(sources: list[type]) -> Any:
        return original([*sources, namespace])

    module.collect_input_fields = collect_input_fields


def add_server_fields(cls: Any, fields: Mapping[str, ServerField]) -> None:
    """Add keyword-only fields at the end of `ServerArgs`, unless it was assembled with them. Raises
    `RuntimeError` if it is no dataclass, nor a struct with our fields."""
    if all(name in getattr(cls, "__struct_fields__", ()) for name in fields):
        return
    if not hasattr(cls, "__dataclass_fields__"):
        raise RuntimeError(f"ServerArgs: expected one as in SGLang {SUPPORTED[-1]}")
    from sglang.srt.arg_groups import arg_utils

    for name, (kind, default, text) in fields.items():
        annotation: Any = Annotated[kind, text]
        field: Any = dataclasses.field(default=default)
        field.name, field.type, field.kw_only = name, annotation, True
        field._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
        cls.__annotations__[name] = annotation
        setattr(cls, name, default)
        cls.__dataclass_fields__[name] = field
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, field in fields.items():
            object.__setattr__(self, name, kwargs.pop(name, field.default))
        original(self, *args, **kwargs)

    cls.__init__ = __init__
    # It caches a result per class and may have been called before.
    arg_utils.resolvable_fields.cache_clear()


def config_file_merger(parser: Any) -> Any:
    try:
        from sglang.srt.server_args_config_parser import ConfigArgumentMerger
    except ImportError:
        from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger
    return ConfigArgumentMerger(parser)


def rows_of_graphs(server_args: "ServerArgs", requests: int) -> int:
    """Rows of the largest decode batch of `requests` requests, as SGLang pads it."""
    try:
        from sglang.srt.utils.common import get_cuda_graph_max_batch_size
    except ImportError:
        # In 0.5.15 the padding is chosen while graphs are captured.
        return server_args.cuda_graph_config.decode.max_bs
    return get_cuda_graph_max_batch_size(requests)


def attention_tp_size(server_args: "ServerArgs") -> int:
    """How many ranks the heads of an attention layer are split among."""
    view: Any = resolved(server_args)
    replicas = view.dp_size if view.enable_dp_attention else getattr(view, "attn_dp_size", 1)
    return view.tp_size // view.attn_cp_size // replicas
