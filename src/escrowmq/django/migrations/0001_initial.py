"""The two tables."""

from typing import Any, ClassVar

from django.db import migrations, models

from escrowmq.django.models import ExactField


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="Marker",
            fields=[
                ("id", ExactField(max_length=64, primary_key=True, serialize=False)),
                ("outcome", models.CharField(max_length=16)),
                ("at_ms", models.BigIntegerField(db_index=True)),
                ("producer_group", ExactField(max_length=255)),
                ("messages", models.IntegerField()),
            ],
            options={"db_table": "escrowmq_marker"},
        ),
        migrations.CreateModel(
            name="Received",
            fields=[
                (
                    "pk",
                    models.CompositePrimaryKey(
                        "consumer_group",
                        "message_id",
                        blank=True,
                        editable=False,
                        primary_key=True,
                        serialize=False,
                    ),
                ),
                ("consumer_group", ExactField(max_length=255)),
                ("message_id", ExactField(max_length=128)),
                ("at_ms", models.BigIntegerField(db_index=True)),
            ],
            options={"db_table": "escrowmq_inbox"},
        ),
    ]
