"""Images: a Transformer over patches (ViT, DeiT) and one in stages (Swin, CvT)."""

MODELS = {
  "vit": "projects.vision.vit_config:VitConfig",
  "pyramid": "projects.vision.pyramid_config:PyramidConfig",
}
TASKS = {"image": "projects.vision.task:ImageConfig"}
FAMILIES = {
  "vit": "projects.vision.vit_family:VIT",
  "deit": "projects.vision.vit_family:DEIT",
  "swin": "projects.vision.swin_family:SWIN",
  "cvt": "projects.vision.cvt_family:CVT",
}
FORMER_KINDS = {"vit": ("encoder", "patch_size")}
