"""Message classes of the two .proto files beside this one, from their descriptors; see the top of hlo.proto."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]


def _read_classes() -> list[Any]:
    """Return the top-level message classes of each file."""
    content = Path(__file__).with_name("messages.binpb").read_bytes()
    pool, modules = descriptor_pool.DescriptorPool(), []
    for file in descriptor_pb2.FileDescriptorSet.FromString(content).file:
        pool.AddSerializedFile(file.SerializeToString())
        messages = pool.FindFileByName(file.name).message_types_by_name
        modules.append(SimpleNamespace(**{k: message_factory.GetMessageClass(m) for k, m in messages.items()}))
    return modules


hlo_pb2, tuning_pb2 = _read_classes()
