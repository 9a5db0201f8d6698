"""Google Kubernetes Engine: a cluster of its own for one run, made whole or not at all, and given back for certain.

``machines`` says what a machine family can do, ``pools`` what a run's cluster looks like, ``client`` how the cloud is asked,
``operations`` how its operations are waited for, ``quota`` whether the machines may be had, ``provision`` and ``release`` do the work.
``fake`` is a cloud on this machine for trying and testing all that without one.
"""
