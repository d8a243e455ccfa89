"""Tell people about the events of a run: which, in which words, when, and over which channel.

The ledger is the only source: the supervisor in the job and `hpctrain watch` on the login node read
the same events and make the same notices of them, so that whoever comes first can send them
(`hpctrain.records.notices`). `notices` and `message_text` are pure.

Belongs here: from the events of a ledger to messages that were sent. Does not belong here: the
fields of documents (`hpctrain.spec.notify`), records of what was sent (`hpctrain.records.notices`),
when somebody looks (`hpctrain.supervise.loop`, `hpctrain.runs.watch`).
"""
