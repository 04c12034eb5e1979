"""The command line: `escrowmq COMMAND …`.

    main.py ── loads commands/NAME.py ── options.py: options → Cluster, Access, times, durations
                    │
                    ├─ escrowmq.admin, store, config, pipeline: values
                    └─ rendering.py, output.py: tables, JSON, --watch → standard output

What always holds: results go to standard output, everything else to standard error. With --json
the output is JSON only. Text for a pipe is never cut. An error is one line, and exit code 2. A
change that cannot be undone needs a confirmation or --yes.

Modules in reading order:

    main.py        the entry point: lazy loading of commands, exit codes, `completion`
    options.py     shared options: cluster, credentials, confirmation; completion of names
    output.py      tables, fields, JSON, --watch, failures of brokers
    rendering.py   records and messages as text and JSON
    commands/      a module per command; see its page
"""
