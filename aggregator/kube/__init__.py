"""The Kubernetes room: the only package that uses the Kubernetes client.

client   transport, authentication, errors          watch   list and watch with resume
review   TokenReview of agents                      lease   who may write
plan     desired minus observed (pure)              write   carries plans out, safely
stop     the stop switch                            withdraw   takes everything of ours away
objects  the fields of Kubernetes objects that we read
"""
