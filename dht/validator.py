"""What our DHT node agrees to keep and to believe: signed records within limits, and nothing else.

hivemind bounds neither how much a node stores nor for how long, and trusts the form of what other nodes answer;
`harden` puts limits on both, through the few places of `DHTNode` that are open to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, final

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils.timed_storage import HeapEntry, ValueWithExpiration

from dht.record import DEFAULT_LIMITS, PEER_ID_CHARACTERS, InvalidRecord, RecordLimits, Verify, open_hashed
from network.identity import Identity

_PACKED_PEER_ID_BYTES: Final = PEER_ID_CHARACTERS + 2  # msgpack's str8: a type byte and a length byte.


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """What a node keeps for others. A full node refuses what is new and goes on renewing what it has."""

    num_keys_max: int = 4096
    num_subkeys_max: int = 4096
    """Under one key."""
    key_bytes_max: int = 2 * 1024 * 1024
    """Of all values under one key: they travel in one message, and p2pd's answers end at 4 MiB."""
    total_bytes_max: int = 64 * 1024 * 1024


@final
class SignedRecordValidator(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types.
    """Accepts values under a subkey that is the id of the peer which signed them (`dht.record`)."""

    def __init__(
        self,
        wall_time: Callable[[], float],
        limits: RecordLimits = DEFAULT_LIMITS,
        verify: Verify = Identity.verify,
    ) -> None:
        self._wall_time = wall_time
        self._limits = limits
        self._verify = verify

    def validate(self, record: DHTRecord) -> bool:
        """`record.subkey` and `record.value` are in msgpack; what a stranger sent may be of any type."""
        try:
            subkey = _unpack(record.subkey, _PACKED_PEER_ID_BYTES)
            value = _unpack(record.value, self._limits.payload_bytes_max + 128)
            open_hashed(
                record.key,
                subkey,
                value,
                record.expiration_time,
                now=self._wall_time(),
                limits=self._limits,
                verify=self._verify,
            )
        except InvalidRecord:
            return False
        return True


def _unpack(packed: object, bytes_max: int) -> object:
    if not isinstance(packed, bytes) or len(packed) > bytes_max:
        raise InvalidRecord("size", "no bytes, or too many")
    try:
        unpacked: object = msgpack.unpackb(packed, raw=False, max_ext_len=0)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRecord("format", f"no msgpack: {error}") from error
    # A second encoding of the same value would count as another one in hivemind's comparisons.
    if not isinstance(unpacked, (str, bytes)) or msgpack.packb(unpacked, use_bin_type=True) != packed:
        raise InvalidRecord("format", "no canonical msgpack")
    return unpacked


@final
class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """hivemind's local storage with limits, for values under subkeys only.

    It also mends two things: an older value that was refused no longer shortens the life of the newer one, and
    the dictionaries that `get` returns are copies, since a search merges other nodes' answers into them.
    """

    def __init__(self, limits: StorageLimits) -> None:
        super().__init__()
        self._limits = limits
        self._bytes: dict[DHTID, int] = {}  # At most: what has expired since the last store counts too.

    def store(self, key: DHTID, value: object, expiration_time: float, subkey: str | None = None) -> bool:
        if subkey is None or not isinstance(value, bytes):
            return False
        return self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: str, value: bytes, expiration_time: float) -> bool:
        self._remove_outdated()
        entry = self.data.get(key)
        if entry is None and (len(self.data) >= self._limits.num_keys_max or self._limits.num_subkeys_max < 1):
            return False
        values: DictionaryDHTValue = DictionaryDHTValue() if entry is None else entry.value
        values._remove_outdated()
        old = values.data.get(subkey)
        if old is not None and old.expiration_time >= expiration_time:
            return False
        if old is None and len(values.data) >= self._limits.num_subkeys_max:
            return False
        num_bytes = sum(len(item.value) for item in values.data.values()) + len(value)
        num_bytes -= 0 if old is None else len(old.value)
        if not self._has_room(key, num_bytes) or not values.store(subkey, value, expiration_time):
            return False
        self._bytes[key] = num_bytes
        _drop_stale_entries(values)
        self.data[key] = ValueWithExpiration(values, values.latest_expiration_time)
        self.key_to_heap[key] = HeapEntry(values.latest_expiration_time, key)
        heapq.heappush(self.expiration_heap, self.key_to_heap[key])
        _drop_stale_entries(self)
        return True

    def get(self, key: DHTID) -> ValueWithExpiration | None:
        entry = super().get(key)
        return None if entry is None else ValueWithExpiration(_copied(entry.value), entry.expiration_time)

    def _has_room(self, key: DHTID, num_bytes: int) -> bool:
        self._bytes = {other: size for other, size in self._bytes.items() if other in self.data}
        total = num_bytes + sum(size for other, size in self._bytes.items() if other != key)
        return num_bytes <= self._limits.key_bytes_max and total <= self._limits.total_bytes_max


def _drop_stale_entries(storage: Any) -> None:
    # Every renewal leaves an entry in the heap until it expires: a peer that renews fast would fill the memory.
    if len(storage.expiration_heap) > 2 * len(storage.data) + 64:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)


def _copied(values: DictionaryDHTValue) -> DictionaryDHTValue:
    copy = DictionaryDHTValue()
    copy.latest_expiration_time = values.latest_expiration_time
    copy.data = dict(values.data)
    copy.expiration_heap = list(values.expiration_heap)
    copy.key_to_heap = dict(values.key_to_heap)
    return copy


def harden(node: DHTNode, storage: BoundedStorage, limits: StorageLimits) -> None:
    """Give `node` bounded storage, no cache, and doubts about what other nodes answer."""
    protocol = node.protocol
    protocol.storage = storage
    protocol.cache = BoundedStorage(StorageLimits(num_keys_max=0))

    def keep_valid(key: bytes, values: DictionaryDHTValue) -> bool:
        return _keep_valid(protocol, key, values, limits.num_subkeys_max)

    find = protocol.call_find

    async def call_find(peer: Any, keys: Collection[DHTID]) -> Any:
        found = await find(peer, keys)
        # A node that names us as our own neighbour would have us call ourselves, which p2pd refuses.
        return found and {
            key: (value, {i: other for i, other in near.items() if i != node.node_id and other != node.peer_id})
            for key, (value, near) in found.items()
        }

    protocol._validate_dictionary = keep_valid
    protocol.call_find = call_find


def _keep_valid(protocol: Any, key: bytes, values: DictionaryDHTValue, num_subkeys_max: int) -> bool:
    """Instead of hivemind's check, by which one bad record among many voids them all.

    The limits that came with the dictionary go too: a size that is no number would end every search that meets it.
    """
    if not isinstance(values, DictionaryDHTValue) or len(values.data) > num_subkeys_max:
        return False
    kept = DictionaryDHTValue()
    with kept.freeze():
        for subkey, (value, expires) in values.data.items():
            if protocol._validate_record(key, protocol.serializer.dumps(subkey), value, expires):
                kept.store(subkey, value, expires)
    values.maxsize = float("inf")
    values.data, values.expiration_heap, values.key_to_heap = kept.data, kept.expiration_heap, kept.key_to_heap
    values.latest_expiration_time = kept.latest_expiration_time
    return bool(kept.data)
