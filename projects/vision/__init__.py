"""Images: a Transformer of patches (ViT, DeiT) and one in stages (Swin, CvT)."""
