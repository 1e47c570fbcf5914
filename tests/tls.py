"""TLS for a PostgreSQL server that has none: a certificate authority for a test, and a proxy that
decrypts.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_VALID = timedelta(days=2)
_SSL_REQUEST = bytes.fromhex("0000000804d2162f")
_CHUNK_BYTES = 1 << 16
_MESSAGE_BYTES_MAX = 1 << 16
_INVALID_AUTHORIZATION = "28000"


class CertificateAuthority:
    """A certificate authority; `certificate` is the PEM file of its own certificate."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("Dormouse tests")
        made = self._builder(self._name, self._key)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.certificate = folder / "ca.pem"
        self.certificate.write_bytes(
            made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )

    def server_certificate(self, name: str) -> tuple[Path, Path]:
        """Returns the PEM files of a certificate for a host, given by name or address, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._builder(_name(name), key)
        host = x509.IPAddress(ip_address(name)) if name[:1].isdigit() else x509.DNSName(name)
        made = made.add_extension(x509.SubjectAlternativeName([host]), critical=False)
        certificate, private = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        certificate.write_bytes(
            made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        private.chmod(0o600)
        return certificate, private

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _VALID)
            .not_valid_after(now + _VALID)
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


class TlsFront:
    """A proxy on loopback in front of a server. It speaks TLS with clients, and refuses clients without TLS.

    It is a context manager, and listens on `port`.
    """

    def __init__(self, certificate: Path, key: Path, server_port: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._server = ("127.0.0.1", server_port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls-front")
        self.port = 0

    def __enter__(self) -> TlsFront:
        self._thread.start()
        self._listener = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(60)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _stop(self) -> None:
        self._listener.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError, asyncio.CancelledError):
            try:
                if await reader.readexactly(len(_SSL_REQUEST)) == _SSL_REQUEST:
                    writer.write(b"S")
                    await writer.start_tls(self._context)
                    await self._pass_on(reader, writer)
            finally:
                writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(*self._server)
        await joined((reader, writer), (from_server, to_server))


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def joined(client: Ends, server: Ends) -> None:
    """Copies bytes both ways until one side ends, then closes the connection to the server."""
    ways = [_copy(client[0], server[1]), _copy(server[0], client[1])]
    try:
        tasks = [asyncio.ensure_future(way) for way in ways]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        server[1].close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while chunk := await source.read(_CHUNK_BYTES):
        target.write(chunk)
        await target.drain()


class AskingFront(TlsFront):
    """A proxy that asks for the password in clear text in place of the server, as RDS does for tokens."""

    def __init__(self, certificate: Path, key: Path, socket_path: str) -> None:
        super().__init__(certificate, key, 0)
        self._socket_path = socket_path

    def _refusal(self, user: str, password: str) -> str | None:
        """Returns the reason to refuse the user with this password, or None. Runs in its own thread."""
        raise NotImplementedError

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        greeting = await _message(reader)
        if user := _user(greeting):
            writer.write(b"R" + struct.pack("!ii", 8, 3))
            await writer.drain()
            await reader.readexactly(1)
            password = (await _message(reader))[4:].rstrip(b"\0").decode()
            refusal = await asyncio.to_thread(self._refusal, user, password)
            if refusal is not None:
                writer.write(_error(refusal))
                await writer.drain()
                return
        from_server, to_server = await asyncio.open_unix_connection(self._socket_path)
        to_server.write(greeting)
        await joined((reader, writer), (from_server, to_server))


async def _message(reader: asyncio.StreamReader) -> bytes:
    """Returns a message of PostgreSQL's protocol with its length, but without the byte of its type."""
    head = await reader.readexactly(4)
    (length,) = struct.unpack("!i", head)
    if not len(head) <= length <= _MESSAGE_BYTES_MAX:
        raise EOFError
    return head + await reader.readexactly(length - len(head))


def _user(greeting: bytes) -> str | None:
    """Returns the user that a startup message names; None for a request to cancel a query."""
    words = greeting[8:].split(b"\0")
    values = dict(zip(words[::2], words[1::2], strict=False))
    return values[b"user"].decode() if b"user" in values else None


def _error(message: str) -> bytes:
    fields = f"SFATAL\0VFATAL\0C{_INVALID_AUTHORIZATION}\0M{message}\0\0".encode()
    return b"E" + struct.pack("!i", 4 + len(fields)) + fields
