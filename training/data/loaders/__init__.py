"""Labelled data of others and of a line -> the one example format (`training.data.examples`).

    forge      the FORGE data set from a local copy
    evidence   a station's evidence folder and the labels that people gave
    masks      pictures and defect masks        names      labels coded in file names
    coco, labelme, yolo                         boxes and polygons as annotation tools write them

A loader turns its source into `Sample`s and notes what it cannot use in `Problems`; `splits`
divides them by group and `writing` puts pictures and examples into a folder that appears whole or
not at all. `python -m training.load` is the command. A loader never changes its source.
"""
