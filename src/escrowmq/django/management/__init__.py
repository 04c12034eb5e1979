"""The commands of manage.py.

commands/   escrowmq_worker
"""
