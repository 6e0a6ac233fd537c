"""What a step of each model allocates and frees, operator by operator as eager PyTorch does it on one rank."""
