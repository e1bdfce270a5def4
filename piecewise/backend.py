"""stub"""


def handle(x): ...
