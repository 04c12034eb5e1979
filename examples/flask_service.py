"""A web service with Flask-SQLAlchemy: `db.session.commit()` commits the row and the message.

flask --app examples/flask_service.py run
curl -d item=lamp http://127.0.0.1:5000/orders

The Escrow belongs to one process. With a server that forks, create it in each worker (gunicorn:
`post_fork`), or let each worker load the application itself.
"""

from __future__ import annotations

import json
import os

from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from escrowmq import Message
from escrowmq.errors import EscrowError
from escrowmq.sql import Escrow

SERVERS = os.environ.get("SERVERS", "127.0.0.1:9876")
DATABASE = os.environ.get("DATABASE", f"sqlite:///{os.getcwd()}/flask_service.db")


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(String(100))


app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = DATABASE
db.init_app(app)
with app.app_context():
    Base.metadata.create_all(db.engine)
    escrow = Escrow(db.engine, SERVERS, group="flask-orders")


@app.post("/orders")
def create_order() -> tuple[dict[str, object], int]:
    order = Order(item=request.form["item"])
    db.session.add(order)
    db.session.flush()  # the database chooses the id
    message = json.dumps({"id": order.id, "item": order.item}).encode()
    escrow.join(db.session).send(Message("flask-orders", message))
    if not order.item:  # Flask-SQLAlchemy rolls back what is not committed
        return {"error": "an order needs an item"}, 422
    db.session.commit()
    return {"id": order.id}, 201


@app.get("/orders")
def list_orders() -> dict[str, list[str]]:
    return {"orders": list(db.session.scalars(db.select(Order.item).order_by(Order.id)))}


@app.errorhandler(EscrowError)
def not_saved(error: EscrowError) -> tuple[dict[str, object], int]:
    """Answer a request whose message could not be sent, so that its session was not committed."""
    return {"error": f"the order was not saved, try again: {error}"}, 503
