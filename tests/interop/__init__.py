"""Compare EscrowMQ on the wire and on disk with Apache RocketMQ, running or captured.

Read in this order:
  1. remoting.py, records.py   an independent client and decoder, which share no code with ours
  2. jars.py, apache.py        fetch Apache RocketMQ, and run it
  3. escrowmq_server.py        run `escrowmq serve` in the same way
  4. capture.py                writes `fixtures/`: `script.py` sends, `observe.py` reads
  5. samples.py, serving.py    stores that both brokers must serve
  6. clients/                  unmodified clients of other projects, and their drivers
"""
