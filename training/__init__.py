"""The hybrid trainer: data, embedding servers, dense network, evaluation."""
