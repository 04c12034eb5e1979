"""The commands of manage.py.

escrowmq_worker.py   run the handlers of an App
"""
