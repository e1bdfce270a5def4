"""Which program attends for a `PagedKVCache`: chosen by name when the cache is made, and no other one then.

`choice` the names, and what each needs · `library` what a library's attention offers to the op ·
`flashinfer` FlashInfer's.

Nothing here imports triton or flashinfer before a cache asks for it by name.
"""
