"""Two file systems of fsspec in memory: its own, and one that shows an object when it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile


class Parts(AbstractBufferedFile):
    """An upload in parts, which nobody sees before the last one is there."""

    def _upload_chunk(self, final: bool = False) -> bool:
        part = self.buffer.getvalue()
        self.fs.__class__.longest = max(self.fs.longest, len(part))
        self.sent = [*getattr(self, "sent", []), part]
        if final:
            self.fs.pipe_file(self.path, b"".join(self.sent))
        return True


class PartsSystem(MemoryFileSystem):
    protocol = "parts"
    longest = 0  # part

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("parts://", "memory://"))

    def open(self, path: str, mode: str = "rb", block_size: int | None = None, **more: Any) -> Any:
        if mode == "wb" and block_size:
            return Parts(self, self._strip_protocol(path), mode, block_size)
        return super().open(path, mode, **more)

    def cat_file(  # in the order that s3fs has
        self, path: str, version_id: str | None = None, start: int | None = None,
        end: int | None = None,
    ) -> bytes:  # fmt: skip
        assert version_id is None
        return super().cat_file(path, start=start, end=end)


@pytest.fixture(params=["memory", "parts"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    fsspec.register_implementation("parts", PartsSystem, clobber=True)
    yield f"{request.param}://run/checkpoints"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
