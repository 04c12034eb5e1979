"""What `manage.py migrate` does to a database."""
