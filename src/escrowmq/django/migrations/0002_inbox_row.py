"""The inbox as the admin sees it. The database does not change."""

from typing import Any, ClassVar

from django.db import migrations, models

from escrowmq.django.models import ExactField


class Migration(migrations.Migration):
    dependencies: ClassVar[list[Any]] = [("escrowmq", "0001_initial")]
    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="InboxRow",
            fields=[
                ("message_id", ExactField(max_length=128, primary_key=True, serialize=False)),
                ("consumer_group", ExactField(max_length=255)),
                ("at_ms", models.BigIntegerField()),
            ],
            options={
                "verbose_name": "received message",
                "db_table": "escrowmq_inbox",
                "managed": False,
            },
        ),
    ]
