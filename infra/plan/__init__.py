"""``satrap plan``: what a configuration needs and costs, worked out before anything is paid for. Offline and pure.

``catalogue`` knows machine types, prices and zones, ``costs`` what a piece of work takes, ``workload`` what a batch is, ``memory`` what
the tables take, ``shape`` which machines there are, ``throughput`` how fast they are together. ``estimate`` makes the plan of these,
``alternatives`` what would be otherwise, ``text`` and ``html`` show it; ``presets`` are configurations to start from.
"""
