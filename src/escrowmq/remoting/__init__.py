"""RocketMQ's remoting protocol as values: bytes in, commands out, and back. No I/O.

    bytes -> frame -> header, one of two encodings -> typed request -> handler
                                            bytes <- frame <- answer <-'

Read in this order:
  1. codes.py       numbers on the wire: requests, answers, flags, languages
  2. frame.py       cut a stream into frames
  3. command.py     a header, and its two encodings (JSON, ROCKETMQ)
  4. headers.py     what is in `extFields`, typed; headers_send, headers_consume, headers_admin and
                    headers_namesrv hold one struct per request and per answer
  5. requests.py    request code -> its two headers
  6. fastpath.py    the same as 3 to 5 in one step, for JSON
  7. connection.py  which answer belongs to which request, on one line
  8. answers.py     the answers a busy broker writes most, preformatted
  9. bodies.py      JSON that travels in bodies
  10. packed.py     the one body that is not JSON: a registration, compressed
"""
