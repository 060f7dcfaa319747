//! A plot of lines, one a policy.

use std::fmt::Write as _;

use super::html::escaped;
use super::policies::class;
use super::scale::{Scale, number};

/// The plot's size and margins, in units of the drawing.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 44.0;

pub(super) struct Axis {
    name: String,
    scale: Scale,
    marks: Vec<f64>,
}

impl Axis {
    /// Marked where its scale says.
    pub(super) fn new(name: impl Into<String>, scale: Scale) -> Self {
        Self { name: name.into(), marks: scale.marks(), scale }
    }

    /// Marked at these values.
    pub(super) fn at(name: impl Into<String>, values: Vec<f64>) -> Self {
        Self { name: name.into(), scale: Scale::through(&values), marks: values }
    }
}

/// A policy's line.
pub(super) struct Line {
    pub(super) policy: &'static str,
    pub(super) points: Vec<Point>,
    pub(super) marked: Marked,
}

/// One point, perhaps with half the height of its confidence interval.
#[derive(Clone, Copy)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) half: Option<f64>,
}

/// Whether each point of a line is a measurement of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Marked {
    Points,
    LineOnly,
}

/// The whole drawing, which `title` says to those who do not see it.
pub(super) fn plot(title: &str, (x, y): (&Axis, &Axis), lines: &[Line]) -> String {
    let title = escaped(title);
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">");
    frame(&mut svg, x, y);
    for line in lines {
        draw(&mut svg, (&x.scale, &y.scale), line);
    }
    svg + "</svg>"
}

fn across(place: f64) -> f64 {
    LEFT + place * (WIDTH - LEFT - RIGHT)
}

fn down(place: f64) -> f64 {
    HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)
}

fn frame(svg: &mut String, x: &Axis, y: &Axis) {
    let (left, right, top, bottom) = (across(0.0), across(1.0), down(1.0), down(0.0));
    for mark in &x.marks {
        let at = across(x.scale.place(*mark));
        let said = number(*mark);
        let _ = write!(svg, "<line class=\"grid-line\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top}\" y2=\"{bottom}\"/>");
        let _ = write!(svg, "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{said}</text>", bottom + 16.0);
    }
    for mark in &y.marks {
        let at = down(y.scale.place(*mark));
        let said = number(*mark);
        let _ = write!(svg, "<line class=\"grid-line\" x1=\"{left}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>");
        let _ = write!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{said}</text>", left - 6.0, at + 4.0);
    }
    let _ = write!(svg, "<path class=\"axis\" fill=\"none\" d=\"M{left} {top}V{bottom}H{right}\"/>");
    let (middle, low) = (f64::midpoint(left, right), HEIGHT - 8.0);
    let name = escaped(&x.name);
    let _ = write!(svg, "<text class=\"soft\" x=\"{middle}\" y=\"{low}\" text-anchor=\"middle\">{name}</text>");
    let (middle, name) = (f64::midpoint(top, bottom), escaped(&y.name));
    let turned = format!("transform=\"translate(13 {middle}) rotate(-90)\" text-anchor=\"middle\"");
    let _ = write!(svg, "<text class=\"soft\" {turned}>{name}</text>");
}

fn draw(svg: &mut String, (x, y): (&Scale, &Scale), line: &Line) {
    let at = |point: &Point| (across(x.place(point.x)), down(y.place(point.y)));
    let class = class(line.policy);
    let _ = write!(svg, "<g class=\"{class}\"><title>{}</title>", line.policy);
    let path: Vec<String> = line.points.iter().map(at).map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
    let _ = write!(svg, "<polyline class=\"series\" points=\"{}\"/>", path.join(" "));
    for point in line.points.iter().filter(|_| line.marked == Marked::Points) {
        let (across, height) = at(point);
        if let Some(half) = point.half {
            let (low, high) = (down(y.place(point.y - half)), down(y.place(point.y + half)));
            let ends = format!("x1=\"{across:.1}\" x2=\"{across:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\"");
            let _ = write!(svg, "<line class=\"whisker\" {ends}/>");
        }
        let said = format!("{} at {}: {}", line.policy, number(point.x), number(point.y));
        let place = format!("cx=\"{across:.1}\" cy=\"{height:.1}\" r=\"3\"");
        let _ = write!(svg, "<circle class=\"dot\" {place}><title>{said}</title></circle>");
    }
    *svg += "</g>";
}
