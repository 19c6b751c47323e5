"""Noise sessions that read the socket in large pieces and write many buffers at once.

The handshake is py-libp2p's. What follows it is ours, because the stock session costs about six
copies and three scheduling points for every 64 KiB: here a write is encrypted straight from the
caller's memory and sent with one system call, and a read decrypts whole packets out of one
receive buffer. The bytes on the wire are the same.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol, cast

import trio
from cryptography.exceptions import InvalidTag
from libp2p.abc import IRawConnection, ISecureConn
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH, NoiseTransportReadWriter
from libp2p.security.noise.transport import Transport
from libp2p.security.secure_session import SecureSession
from noise.exceptions import (  # type: ignore[import-untyped]
    NoiseInvalidMessage,
    NoiseValueError,
)

Buffer = bytes | bytearray | memoryview

_LENGTH_BYTES = 2
_MAX_PACKET_BYTES = _LENGTH_BYTES + 0xFFFF
_RECEIVE_BYTES = 256 * 1024
# Buffers up to this size share a packet with their neighbours; longer ones are never copied.
_SMALL_BYTES = 4096
_NOTHING = memoryview(b"")


class _Cipher(Protocol):
    def encrypt_with_ad(self, ad: bytes | None, plaintext: Buffer) -> bytes: ...

    def decrypt_with_ad(self, ad: bytes | None, ciphertext: Buffer) -> bytes: ...


class NoiseSession(SecureSession):
    """An encrypted TCP connection after its handshake.

    Raises ConnectionClosedError when the connection ended or the peer's bytes are not authentic.
    A cancelled write leaves the connection unusable: the muxer shields it.
    """

    def __init__(self, session: SecureSession) -> None:
        super().__init__(
            local_peer=session.local_peer,
            local_private_key=session.local_private_key,
            remote_peer=session.remote_peer,
            remote_permanent_pubkey=session.remote_permanent_pubkey,
            is_initiator=session.is_initiator,
            conn=session.conn,
        )
        packets = cast(NoiseTransportReadWriter, session.conn)
        raw = cast(RawConnection, packets.read_writer.read_write_closer)
        self._stream = cast(TrioTCPStream, raw.stream).stream
        protocol = packets.noise_state.noise_protocol
        self._encrypt = cast(_Cipher, protocol.cipher_state_encrypt).encrypt_with_ad
        self._decrypt = cast(_Cipher, protocol.cipher_state_decrypt).decrypt_with_ad
        self._received = bytearray(_RECEIVE_BYTES + _MAX_PACKET_BYTES)
        self._view = memoryview(self._received)
        self._start = self._end = 0
        self._plain = _NOTHING

    @property
    def socket(self) -> trio.socket.SocketType:
        """The TCP socket below."""
        return self._stream.socket

    def abort(self) -> None:
        """Shut the socket down: pending reads and writes end at once, whatever the peer does."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    async def write_vectors(self, buffers: Sequence[Buffer]) -> None:
        """Encrypt and send all buffers, in order."""
        packets: list[bytes] = []
        small: list[Buffer] = []
        for buffer in buffers:
            if len(buffer) <= _SMALL_BYTES and len(small) < MAX_PLAINTEXT_LENGTH // _SMALL_BYTES:
                small.append(buffer)
                continue
            self._pack(packets, b"".join(small))
            small.clear()
            self._pack(packets, buffer)
        self._pack(packets, b"".join(small))
        await self._send(b"".join(packets))

    def _pack(self, packets: list[bytes], plain: Buffer) -> None:
        view = memoryview(plain)
        for at in range(0, len(view), MAX_PLAINTEXT_LENGTH):
            packet = self._encrypt(None, view[at : at + MAX_PLAINTEXT_LENGTH])
            packets.append(len(packet).to_bytes(_LENGTH_BYTES, "big"))
            packets.append(packet)

    async def _send(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError("the connection is closed", transport="tcp") from error

    async def read_into(self, view: memoryview) -> None:
        """Fill ``view`` completely."""
        at = 0
        while at < len(view):
            if not self._plain:
                await self._next_packet()
            num_bytes = min(len(self._plain), len(view) - at)
            view[at : at + num_bytes] = self._plain[:num_bytes]
            self._plain = self._plain[num_bytes:]
            at += num_bytes

    async def read_some(self, max_bytes: int) -> memoryview:
        """Return between 1 and ``max_bytes`` bytes as soon as there are any."""
        while not self._plain:
            await self._next_packet()
        part, self._plain = self._plain[:max_bytes], self._plain[max_bytes:]
        return part

    async def read(self, n: int | None = None) -> bytes:
        """py-libp2p's read, used while protocols are negotiated."""
        return bytes(await self.read_some(_RECEIVE_BYTES if n is None else n)) if n != 0 else b""

    async def write(self, data: bytes) -> None:
        """py-libp2p's write, used while protocols are negotiated."""
        await self.write_vectors([data])

    async def _next_packet(self) -> None:
        while True:
            held = self._end - self._start
            if held >= _LENGTH_BYTES:
                begin = self._start + _LENGTH_BYTES
                end = begin + int.from_bytes(self._view[self._start : begin], "big")
                if end <= self._end:
                    self._plain = self._open(self._view[begin:end])
                    self._start = end
                    return
            await self._receive()

    def _open(self, packet: memoryview) -> memoryview:
        try:
            return memoryview(self._decrypt(None, packet))
        except InvalidTag as error:
            raise ConnectionClosedError("the bytes are not the peer's", transport="tcp") from error

    async def _receive(self) -> None:
        held = self._end - self._start
        if not held:
            self._start = self._end = 0
        elif len(self._view) - self._start < _MAX_PACKET_BYTES:
            self._view[:held] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, held
        try:
            num_bytes = await self.socket.recv_into(self._view[self._end :])
        except (OSError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError("the connection broke", transport="tcp") from error
        if not num_bytes:
            raise ConnectionClosedError("the peer closed the connection", transport="tcp")
        self._end += num_bytes


@contextmanager
def _foreign_bytes() -> Iterator[None]:
    """Report what a peer's handshake makes the Noise library raise as a failed handshake."""
    try:
        yield
    except (InvalidTag, NoiseInvalidMessage, NoiseValueError, ValueError) as error:
        raise HandshakeFailure("the handshake is not valid Noise") from error


class NoiseTransport(Transport):
    """Noise XX whose sessions are ``NoiseSession``; the only security that our hosts offer."""

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        """Answer a handshake; the peer proves its PeerID."""
        with _foreign_bytes():
            return NoiseSession(cast(SecureSession, await super().secure_inbound(conn)))

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        """Start a handshake; it fails unless the peer proves ``peer_id``."""
        with _foreign_bytes():
            return NoiseSession(cast(SecureSession, await super().secure_outbound(conn, peer_id)))
