"""An image whose digest is known: found in the store, or imported by one worker for all nodes.

    it is in the store          that is the way to it
    nobody imports it           this worker does: enroot, the bytes to the disk, one rename
    somebody imports it         waits, and looks again; takes over from who died

Whoever imports says so to the others by heartbeats (import_lease.py), and stops once somebody else
does.
"""

import contextlib
import hashlib
import threading
from pathlib import Path

import msgspec

from forestage.clock import Clock, Deadline
from forestage.errors import Declined
from forestage.features.registry import enroot_import, reference, resolve, store, user_notes
from forestage.features.registry.enroot_import import EnrootImport
from forestage.features.registry.environment import EnrootSettings
from forestage.features.registry.import_lease import ImportLease, make_lease_record
from forestage.features.registry.parent_pipe import ParentPipe
from forestage.features.registry.reference import ImageReference
from forestage.features.registry.store import ImageRecord, ImageStore, convert_store_errors
from forestage.features.registry.worker_messages import ImportOrder, ImportProgress, ImportUnderWay
from forestage.system import records
from forestage.units import format_duration, format_size

AGAIN = 30.0  # seconds for a registry that is asked once more; no heartbeat meanwhile
POLL = 0.2  # seconds between looks at a running import
WATCH = 1.0  # seconds between looks at another's import
TELL = 30.0  # seconds between two lines for the user

ENOUGH_FREE_BYTES = 16 << 30  # bytes free in the store from which on no registry is asked for sizes

SHARED_FAILURE_REASONS = ("import-failed", "too-large", "registry-moved", "store-full")
"""Why an import failed that would fail for whoever waited for it as well."""


class ImportSuperseded(Exception):
    """Another worker took the import over; this one's is given up."""


class ImportTask(msgspec.Struct, frozen=True):
    """What is known of the order once it was read; `jobs` is empty where it is none of a job's.

    The last of them is the order's own; the one before is the whole job of a step, whose digest
    counts for the step, if there is one.
    """

    order: ImportOrder
    reference: ImageReference
    settings: EnrootSettings
    jobs: tuple[str, ...]

    @property
    def canonical_text(self) -> str:
        return self.reference.canonical_text

    def image_name(self, digest: str) -> str:
        """The name of the image; one without a digest is of this job alone."""
        settings = self.settings
        if digest:
            return reference.make_image_name(
                self.reference, digest, settings.arch, settings.squash_options
            )
        parts = (
            *self.jobs[:1],
            self.reference.canonical_text,
            settings.arch,
            settings.squash_options,
        )
        return f"job-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:32]}"


class ImageImport:
    """What one worker does for one image."""

    def __init__(
        self, task: ImportTask, digest: str, where: ImageStore, parent: ParentPipe, clock: Clock
    ) -> None:
        self.task, self.digest, self.store = task, digest, where
        self.parent, self.clock = parent, clock
        self.name = task.image_name(digest)
        self.lease = ImportLease(where, self.name, make_lease_record(task.order.host), clock)
        self._spoke = clock.monotonic()

    def obtain(self) -> Path:
        """Returns where the image lies. Raises Declined, ParentGone."""
        since, holder = self.clock.monotonic(), ""
        while True:
            found = self.store.find_image(self.name)
            if found is not None:
                return found
            failed = self.lease.find_failure()
            if failed is not None:
                raise Declined(failed.reason, failed.detail)
            self._check_not_known_full()
            if self.lease.try_acquire():
                with contextlib.suppress(ImportSuperseded):
                    return self._import_alone()
                continue
            where = self.lease.holder.host if self.lease.holder else ""
            if where != holder:
                holder = where
                self.parent.send_message(ImportUnderWay(where))
            waits = format_duration(self.clock.monotonic() - since)
            self._report_progress(f"{where or 'another node'} imports it; waited for {waits}")
            self.parent.check_parent()
            self.clock.sleep(WATCH)

    def _check_not_known_full(self) -> None:
        """Raises Declined where this node knows that an import fails for want of room."""
        known = user_notes.find_full_store(self.task.order.marks, self.name, self.clock.wall())
        if known and self.store.free_bytes <= known.free:
            raise Declined("store-full", known.detail)

    def _report_progress(self, text: str) -> None:
        if self.clock.monotonic() - self._spoke >= TELL:
            self._spoke = self.clock.monotonic()
            self.parent.send_message(ImportProgress(text))

    def _import_alone(self) -> Path:
        """Imports the image, which this worker alone does now."""
        part = self.store.new_part_path(self.name)
        try:
            found = self.store.find_image(
                self.name
            )  # the one before may have ended between two looks
            if found is None:
                self._check_layers_fit()
                self.parent.send_message(ImportUnderWay(self.task.order.host, here=True))
                self._run_enroot(part)
                self._sync_image(part)
                found = self._publish(part)
        except Declined as error:
            self.store.delete_part(part)  # or a store that is full has no room for the word of it
            if error.reason in SHARED_FAILURE_REASONS:
                self.lease.release(error.reason, str(error))
            raise
        finally:
            self.store.delete_part(part)
            self.lease.release()
        return found

    def _check_layers_fit(self) -> None:
        """Raises Declined where the layers alone are larger than what the store has left.

        A registry that gave no digest is not asked for sizes.
        """
        free = self.store.free_bytes
        if free >= ENOUGH_FREE_BYTES or not self.digest:
            return
        task, stop = self.task, Deadline.after(AGAIN, self.clock)
        layers = resolve.sum_layer_bytes(task.reference, task.settings, self.digest, stop)
        if layers > free:
            raise store.make_full_error(
                f"its layers have {format_size(layers)}, and {format_size(free)} are free"
            )

    def _check_still_ours(self) -> None:
        """Raises ParentGone, ImportSuperseded."""
        self.parent.check_parent()
        if not self.lease.send_heartbeat():
            raise ImportSuperseded

    def _run_enroot(self, part: Path) -> None:
        """Runs enroot to its end. Raises Declined, ParentGone, ImportSuperseded."""
        task = self.task
        enroot_import.limit_process(task.order.max_size)
        # Without a digest by the tag, as an enroot of old does.
        enroot = task.settings.enroot_version if self.digest else (0, 0, 0)
        uri = task.reference.enroot_uri(self.digest, enroot)
        at_work = EnrootImport(uri, part, task.settings, self.clock, task.order.apart)
        try:
            while at_work.is_running_after(POLL):
                self._check_still_ours()
                self._report_progress(at_work.format_progress())
            # An enroot that was ended with this worker has not failed for others.
            self._check_still_ours()
            at_work.check_success()
        finally:
            at_work.kill(self.parent.is_signalled)

    def _sync_image(self, part: Path) -> None:
        """Has the file's bytes reach the store, which may take minutes.

        Raises as `_run_enroot` does.
        """
        failed: list[OSError] = []

        def sync() -> None:
            try:
                records.sync_file(part)
            except FileNotFoundError:
                return  # enroot has made nothing, which is told later
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=sync, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL)
            self._check_still_ours()
            self._report_progress("the image is written to the store")
        with convert_store_errors(self.store.folder):
            for error in failed:  # the kernel says it once, to whoever asks first
                raise error

    def _publish(self, part: Path) -> Path:
        """The image under its name, if it still is what was asked for."""
        task = self.task
        if self.digest and not task.reference.digest and not task.settings.can_import_digests:
            self._check_tag_unmoved()
        if not self.lease.renew_if_newest():
            raise ImportSuperseded
        record = ImageRecord(
            task.canonical_text, self.digest, self.clock.wall(), 0, task.order.host
        )
        return self.store.publish_image(self.name, part, record, task.order.max_size)

    def _check_tag_unmoved(self) -> None:
        """For an enroot that imported by the tag. Raises Declined."""
        task = self.task
        now = resolve.resolve_digest(
            task.reference, task.settings, Deadline.after(AGAIN, self.clock)
        )
        if now != self.digest:
            what = f"{task.canonical_text} was pushed anew while it was imported"
            raise Declined("registry-moved", what, "enroot 4 and later can import what was meant")
