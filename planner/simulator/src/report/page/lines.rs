//! Line plots, with one line per policy.

use std::fmt::Write as _;

use super::html::escaped;
use super::policies::class;
use super::scale::{AxisScale, number};

/// Size and margins of the plot, in SVG units.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 44.0;

pub(super) struct Axis {
    name: String,
    scale: AxisScale,
    ticks: Vec<f64>,
}

impl Axis {
    /// Creates an axis with the ticks of its scale.
    pub(super) fn new(name: impl Into<String>, scale: AxisScale) -> Self {
        Self { name: name.into(), ticks: scale.ticks(), scale }
    }

    /// Creates an axis with ticks at these values.
    pub(super) fn at(name: impl Into<String>, values: Vec<f64>) -> Self {
        Self { name: name.into(), scale: AxisScale::through(&values), ticks: values }
    }
}

/// Line of one policy.
pub(super) struct PlotLine {
    pub(super) policy: &'static str,
    pub(super) points: Vec<PlotPoint>,
    pub(super) markers: PointMarkers,
}

/// One point, optionally with half the height of its confidence interval.
#[derive(Clone, Copy)]
pub(super) struct PlotPoint {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) half_interval: Option<f64>,
}

/// Whether each point of a line is a separate measurement.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PointMarkers {
    Points,
    LineOnly,
}

/// Returns the plot as SVG; `title` is its accessible description.
pub(super) fn plot(title: &str, (x, y): (&Axis, &Axis), lines: &[PlotLine]) -> String {
    let title = escaped(title);
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" aria-label=\"{title}\">");
    frame(&mut svg, x, y);
    for line in lines {
        draw(&mut svg, (&x.scale, &y.scale), line);
    }
    svg + "</svg>"
}

fn x_position(place: f64) -> f64 {
    LEFT + place * (WIDTH - LEFT - RIGHT)
}

fn y_position(place: f64) -> f64 {
    HEIGHT - BOTTOM - place * (HEIGHT - TOP - BOTTOM)
}

fn frame(svg: &mut String, x: &Axis, y: &Axis) {
    let (left, right, top, bottom) = (x_position(0.0), x_position(1.0), y_position(1.0), y_position(0.0));
    for mark in &x.ticks {
        let at = x_position(x.scale.position(*mark));
        let label = number(*mark);
        let _ = write!(svg, "<line class=\"grid-line\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top}\" y2=\"{bottom}\"/>");
        let _ = write!(svg, "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", bottom + 16.0);
    }
    for mark in &y.ticks {
        let at = y_position(y.scale.position(*mark));
        let label = number(*mark);
        let _ = write!(svg, "<line class=\"grid-line\" x1=\"{left}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>");
        let _ = write!(svg, "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>", left - 6.0, at + 4.0);
    }
    let _ = write!(svg, "<path class=\"axis\" fill=\"none\" d=\"M{left} {top}V{bottom}H{right}\"/>");
    let (middle, low) = (f64::midpoint(left, right), HEIGHT - 8.0);
    let name = escaped(&x.name);
    let _ = write!(svg, "<text class=\"soft\" x=\"{middle}\" y=\"{low}\" text-anchor=\"middle\">{name}</text>");
    let (middle, name) = (f64::midpoint(top, bottom), escaped(&y.name));
    let turned = format!("transform=\"translate(13 {middle}) rotate(-90)\" text-anchor=\"middle\"");
    let _ = write!(svg, "<text class=\"soft\" {turned}>{name}</text>");
}

fn draw(svg: &mut String, (x, y): (&AxisScale, &AxisScale), line: &PlotLine) {
    let at = |point: &PlotPoint| (x_position(x.position(point.x)), y_position(y.position(point.y)));
    let class = class(line.policy);
    let _ = write!(svg, "<g class=\"{class}\"><title>{}</title>", line.policy);
    let path: Vec<String> = line.points.iter().map(at).map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
    let _ = write!(svg, "<polyline class=\"series\" points=\"{}\"/>", path.join(" "));
    for point in line.points.iter().filter(|_| line.markers == PointMarkers::Points) {
        let (across, height) = at(point);
        if let Some(half) = point.half_interval {
            let (low, high) = (y_position(y.position(point.y - half)), y_position(y.position(point.y + half)));
            let ends = format!("x1=\"{across:.1}\" x2=\"{across:.1}\" y1=\"{low:.1}\" y2=\"{high:.1}\"");
            let _ = write!(svg, "<line class=\"whisker\" {ends}/>");
        }
        let text = format!("{} at {}: {}", line.policy, number(point.x), number(point.y));
        let place = format!("cx=\"{across:.1}\" cy=\"{height:.1}\" r=\"3\"");
        let _ = write!(svg, "<circle class=\"dot\" {place}><title>{text}</title></circle>");
    }
    *svg += "</g>";
}
