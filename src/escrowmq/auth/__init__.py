"""Who may do what: signatures, rules, the files they are written in. It opens nothing.

Read in this order:
  1. rules.py       what a request needs, what an account grants
  2. addresses.py   patterns of client addresses
  3. files.py       text to rules: RocketMQ's plain_acl.yml, and its users and policies
  4. signature.py   how a request is signed
  5. guard.py       one request in; a refusal, or nothing
"""
