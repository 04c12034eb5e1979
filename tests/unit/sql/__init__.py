"""The SQLAlchemy binding, on SQLite files and without a broker."""
