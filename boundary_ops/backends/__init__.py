"""Which program attends for a `PagedKVCache`: chosen by name when the cache is made, and no other one then.

`choice` the names, and what each needs · `library` what a library's attention offers to the op · `varlen`
torch's own, over pages · `flashinfer` FlashInfer's · `scratch` a call on memory of its own, to warm up.

Nothing here imports triton, flashinfer or `torch.nn.attention.varlen` before a cache asks for it by name.
"""
