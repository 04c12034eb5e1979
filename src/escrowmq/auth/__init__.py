"""Authentication and authorisation of requests. No socket, file or clock: values in, values out.

    ACL file --> acl.py: accounts, policies --> AccessRules
                                                    |
    request, peer address ----------------> validator.py --> access key, or AccessRefused
                                                    |
                                  signature.py, strong_signature.py

1. Load.       The text of an ACL file becomes AccessRules: accounts, what each may do, and
               addresses that are trusted.                                           (acl.py)
2. Sign.       A client adds its access key and a signature to every request: RocketMQ's, or our
               own, which covers more.                    (signature.py, strong_signature.py)
3. Validate.   The broker or name server finds the account, verifies the signature and compares
               the permissions that the request requires with those of the account.
                                                                            (validator.py)

What always holds:
  - what no rule allows is refused;
  - a file that cannot be read changes nothing: the old rules stay in force;
  - no error message and no log line contains a secret, or tells whether an access key exists.

`broker/dispatch.py` says which permissions each request requires.
"""
