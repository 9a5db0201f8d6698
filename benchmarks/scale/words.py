"""The words of docs/scale.md. Figures come in through braces, so that a sentence cannot outlive the run that it speaks of."""

from __future__ import annotations

KWAI = {8: (4.04, 0.81), 16: (3.14, 0.63), 32: (2.74, 0.72), 64: (2.63, 0.69)}
"""Published, read off a plot to some percent: GPUs -> hybrid / sync, hybrid / async of the data set Kwai-Video."""

ASSUMED_TEXT = {
    "wire_seconds": "one way between two machines of a zone, seconds",
    "gpu_flops": "data sheet of the A100, float32 without tensor cores",
    "gpu_efficiency": "share of that which a large matrix product reaches; acts as gpu_flops does",
    "bus_bytes_per_second": "host to GPU and back, per rank",
    "launch_seconds": "host time of a step that its GPU waits for",
    "thread_efficiency": "of a server's threads; measured for 2 threads (0.74 and 0.84), here taken for 16",
    "jitter": "deviation of a computation's time over its mean",
    "growth_beyond": "growth of a row's cost past the largest measured table, as a share of its growth over the last measured decade",
    "ids_alpha": "Zipf exponent of a slot's ids",
}

HEAD = """# Scale

<!-- Written by benchmarks/scale/report.py; change the words in benchmarks/scale/words.py. -->

What the whole gang would do: 30 parameter servers (m2-ultramem-416), 70 embedding workers and 30 loaders (c2-standard-30), 64 ranks on 8
a2-highgpu-8g. **Nobody ran it.** Figures here come from a discrete-event simulation of every message, with costs measured on one small
machine, bandwidths from the catalogue and assumptions that are listed below. What really ran is the last part, on one core.

In short, at 1e14 parameters and 64 GPUs:

- Fitted to three published figures with three unknown costs, the simulation meets those three. That is no evidence by itself.
- What the fit leaves open comes out flat from 6.25e12 to 1e14 parameters, within {published_flat} (published: within {measured_flat}).
- It does **not** reproduce how the published ratios change with the number of GPUs.
- With our measured costs and nothing fitted, hybrid is {ours_8_sync} times sync and {ours_8_async} of async at width 8, {ours_128_sync} and
  {ours_128_async} at width 128: the published 2.6 and 0.89 are **not** what our own costs predict.
- The predicted throughput of ours, {ours_8_rate} million samples/s at width 8, holds for a rank that does only what is modelled. The
  trainer has no GPU code yet: the GPU's part of a step is computed from a data sheet.
- Rows are **not** equally fast in tables of any size. Real tables at capacity look up and insert {most_rate} million rows/s per core at
  {least_rows} rows and {least_rate} at {most_rows}. That does not show in a gang whose servers wait for the GPUs most of the time.

To repeat: `python -m benchmarks.scale` (simulations and this page, ten minutes on two cores); parts: `python -m benchmarks.scale --help`.
"""

FIT = """## Modes

Million samples/s at 1e14 parameters on 64 GPUs, 4096 records per rank and step (assumed: the published batch size is unknown), staleness
bound 4; median of three seeds (lowest to highest).

{modes}

![Modes by number of GPUs](scale-modes.svg)

**Fitted.** The published system has three costs in this simulation that nobody published. They were chosen to meet the column "published",
by records per rank and step; the page uses those for 4096:

{table}

Its width is taken as 8, because that gives the published network its published 12 million weights; between workers and servers it sends
float32. Everything else is as in ours. Whatever else slowed the real system down sits in these three numbers, rightly or not.
The batch size was not published, and the three figures hardly tell: from 2048 to 8192 all are met, by other jitter; at 1024 the all-reduce
alone takes more of a step than hybrid loses to async.
"""

HELD_OUT = """## What the fit does not decide

**By number of parameters** (mode hybrid). More parameters mean more different ids in a batch and a larger table on every server, whose rows
cost more (see the costs below: three times as much at 1e8 rows as at 1e6). Fitted at 1e14 only; spread over the sizes {published_flat}.

{sizes}

It is flat because a server's table works {table_use} of the time at most, so that even a several times slower row would not show. This
flatness was put in rather than found: nothing in the simulation grows with parameters but a row's cost and the different ids of a batch.

![Throughput by number of parameters](scale-sizes.svg)

**By number of GPUs.** The published ratios of another data set (Kwai-Video: another model, other machines, V100) against the same fit:

{gpus}

The direction agrees roughly (the more ranks, the longer a barrier takes), the size does not: the published advantage over sync falls from
4.0 to 2.6, the simulated one hardly, and the published share of async is lower throughout. The model lacks what made sync so slow with few
GPUs there.
"""

OURS = """## Ours, predicted

By size, mode hybrid, measured costs, nothing fitted; how much of the time the busiest stations worked. A station below 100 % still limits:
ranks wait for the slowest of them and for the all-reduce.

{sizes}

{widths}

**Against the published system.** At width 8 ours is predicted at {gain} times the fitted one. Read that with care: the difference is
the two fitted costs that ours does not have. The worker's is measured in ours and far smaller. The rank's is not measured at all, as the
trainer has no GPU path. If ours had the fitted cost per record of a rank, too, the modes would do {handicap_sync}, {handicap_hybrid} and
{handicap_async} million samples/s (sync, hybrid, async): no faster in hybrid and async than what was published, faster only in sync. So
nothing here shows that ours is faster than the published system; it shows that a rank's own work decides it.
"""

SWEPT = """## One quantity at a time

Ours at width 128, mode hybrid, 1e14 parameters, otherwise as above. Whether so many servers hold the tables is another question.

**More is not faster.** More servers, workers or threads than needed come out some percent slower. So do workers that are faster per byte:
their vectors arrive in shorter bursts, which meet the all-reduce on the GPU machines' network, and with a network for each that effect is
gone (million samples/s, below). That the same is behind the servers, workers and threads is likely and was not tested.

{bursts}

{table}

![Sweeps](scale-sweeps.svg)
"""

SENSITIVITY = """## How much depends on what

Change of three figures when one quantity alone is halved or doubled, one seed. In the fitted system 2 % or less is
chance, in ours at width 128 5 % (its seeds differ by as much). That costlier bytes or sums make ours faster is the effect of bursts above.

The published system, fitted:

{published}

![Sensitivity of the fitted system](scale-sensitivity.svg)

Ours at width 128:

{ours}

Assumptions:

{assumed}
"""

REAL = """## Real tables at capacity

These ran (`{command}`), on one core: tables of width 16 under an id space of 1e14
parameters, that is signs uniform in 2^64. Each table was first filled with twice what it holds. Then every batch of 100,000 was half
regulars (a tenth of capacity, coming round in turn) and half strangers that are never seen again, each of which costs an eviction. "Never
lost" is the share of regulars whose row holds every update ever made to it; the rest were evicted at least once and began anew, because
what goes is the least recently used of a bucket, not of the table.

{table}

{long}
"""

END = """## Costs

Measured on {cpu} ({vector}), {cores} cores, {memory_gib} GiB, Python {python}, {date}, by `{command}`:

{costs}

The servers of the simulation hold up to 2.6e10 rows each at width 128, far beyond the largest table measured; past it a row's cost is
taken to grow as over the last decade measured (`growth_beyond`). A processor of another kind has other costs.

Not simulated: failures, checkpoints, evaluation, reading from the bucket, uneven load by popular ids, other tenants of the network.
Look-ups in the real tables differ from run to run as the machine does; compare tenths of one run rather than runs.
"""
