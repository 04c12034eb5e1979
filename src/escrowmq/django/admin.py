"""The two tables in Django's admin, to look at. Nothing can be changed there: a marker that is
changed by hand decides a transaction."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from escrowmq.clock import UTC, Timestamp
from escrowmq.django.models import InboxRow, Marker


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # not generic at run time
    """A list that can be searched, without links and buttons that change anything."""

    list_display_links = None
    ordering = ("-at_ms",)

    def has_add_permission(self, request: HttpRequest, *args: Any) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display(description="at", ordering="at_ms")
    def at(self, row: Any) -> Timestamp:
        return Timestamp.fromtimestamp(row.at_ms / 1000, UTC)


@admin.register(Marker)
class MarkerAdmin(ReadOnlyAdmin):
    """Transactions that committed, and those that a check rolled back."""

    list_display = ("id", "outcome", "producer_group", "messages", "at")
    list_filter = ("outcome", "producer_group")
    search_fields = ("id",)


@admin.register(InboxRow)
class InboxRowAdmin(ReadOnlyAdmin):
    """Messages that had their effect."""

    list_display = ("message_id", "consumer_group", "at")
    list_filter = ("consumer_group",)
    search_fields = ("message_id",)

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        # Several groups may have received the same message.
        return self.get_queryset(request).filter(pk=object_id).first()
