"""A run's gang on Kubernetes: one JobSet of four roles, admitted as a whole by Kueue.

``sizes`` says what of a machine a pod may have, ``pods`` what runs in it, ``jobset`` and ``queue`` what is asked of JobSet and of Kueue,
``manifests`` puts them in order, ``client`` is how the cluster is spoken to, ``launch`` starts a gang and brings back how it ended.
``fake`` is a cluster on this machine, without nodes: it stores what is asked of it and refuses what the ``schemas`` do not know.
"""
