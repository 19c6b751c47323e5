"""The daemon's side of an export: the states of all stages, as lines of JSON and raw bytes."""

from __future__ import annotations

from node.status import ErrorAnswer, ExportLine
from node.streaming import Emit
from protocol.core import NodeCore
from protocol.errors import ShoalError
from protocol.manifest import Manifest
from protocol.ports import Tensor
from stages.tokenizer import Tokenizer


async def feed_export(core: NodeCore, manifest: Manifest, tokenizer: Tokenizer, emit: Emit) -> None:
    """Emit everything that the folder is made of; once begun, an error is the last line.

    Raises NotAllowed or Unreachable if it cannot begin.
    """
    async with core.sessions.export() as export:
        await _emit_line(
            emit,
            ExportLine(
                kind="begin", step=export.step, manifest=manifest.to_toml(),
                tokenizer=tokenizer.to_json(), separator=tokenizer.separator,
                separator_name=tokenizer.separator_name,
            ),
        )  # fmt: skip
        try:
            for stage in range(manifest.num_stages + 1):

                async def take(piece: Tensor, is_first: bool, stage: int = stage) -> None:
                    data = piece.numpy().tobytes()
                    line = ExportLine(
                        kind="piece", stage=stage, is_first=is_first, num_bytes=len(data)
                    )
                    await _emit_line(emit, line, data)

                digest = await export.collect(stage, take)
                await _emit_line(emit, ExportLine(kind="stage", stage=stage, digest=digest))
        except ShoalError as error:
            told = ErrorAnswer(code=error.code, cause=error.cause, hint=error.hint)
            await _emit_line(emit, ExportLine(kind="error", error=told))
            return
        await _emit_line(emit, ExportLine(kind="end"))


async def _emit_line(emit: Emit, line: ExportLine, data: bytes = b"") -> None:
    await emit(line.model_dump_json(exclude_defaults=True).encode() + b"\n" + data)
