"""What every database binding shares, whatever speaks to the database.

marker      the protocol of the marker row: who may say what became of a transaction
held        the messages of one local transaction
caretaker   the work that nobody waits for: being known to brokers, removing old rows
"""
