"""What a kernel of any implementation is given, computed in XLA: no Pallas here."""
