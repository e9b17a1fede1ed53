from __future__ import annotations

from forestage.views.through.server_memory import PendingRead, RequestJournal

READ = PendingRead(unique=2**63 + 2, offset=2**40, size=2**20, servers_ended=7, pid=4_000_000)


def test_request_journal_lists_a_read_until_its_reply_clears_the_record() -> None:
    memory = RequestJournal(receivers=2)
    assert memory.is_empty()
    memory.write_record(5, READ)
    memory.write_record(memory.records - 1, READ)
    assert list(memory.list_reads()) == [(5, READ), (memory.records - 1, READ)]
    assert memory.read_record(5) == READ
    assert not memory.is_empty()
    memory.clear_record(5)
    memory.clear_record(memory.records - 1)
    assert memory.is_empty()


def test_request_journal_with_a_request_in_a_slot_is_not_empty() -> None:
    memory = RequestJournal(receivers=3)
    memory.request_slot(2)[:8] = (40).to_bytes(4, "little") + b"read"
    assert not memory.is_empty()
    assert bytes(memory.request_slot(1)[:8]) == bytes(8)
    memory.clear_slot(2)
    assert memory.is_empty()
    memory.write_record(0, READ)
    assert bytes(memory.request_slot(2)[4:8]) == b"read"


def test_request_journal_records_the_end_of_the_server() -> None:
    memory = RequestJournal(receivers=2)
    assert not memory.has_ended
    memory.mark_ended()
    assert memory.has_ended
    assert memory.is_empty()
