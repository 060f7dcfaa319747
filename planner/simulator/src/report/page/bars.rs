//! Bar charts, with one bar per policy or tier policy and one or more parts per bar.

use std::borrow::Cow;
use std::fmt::Write as _;

use super::html::escaped;
use super::policies::class;
use super::scale::{AxisScale, number};

const WIDTH: f64 = 640.0;
const LEFT: f64 = 158.0;
const RIGHT: f64 = 58.0;
const ROW_HEIGHT: f64 = 21.0;
const BAR_HEIGHT: f64 = 15.0;

pub(super) struct Bar {
    /// Name of the policy or tier policy.
    pub(super) name: Cow<'static, str>,
    /// Parts from left to right; empty if nothing was measured.
    pub(super) parts: Vec<f64>,
}

pub(super) struct BarChart<'a> {
    /// Accessible description of the chart.
    pub(super) title: String,
    /// Names of the parts; a single empty name if bars have one part.
    pub(super) parts: &'a [&'a str],
    /// Unit of the values.
    pub(super) unit: &'a str,
    pub(super) scale: AxisScale,
}

impl BarChart<'_> {
    pub(super) fn plot(&self, bars: &[Bar]) -> String {
        let height = ROW_HEIGHT * bars.len() as f64 + 24.0;
        let title = escaped(&self.title);
        let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\">");
        for mark in self.scale.ticks() {
            let (at, low) = (x_position(self.scale.position(mark)), height - 20.0);
            let label = number(mark);
            let _ = write!(svg, "<line class=\"grid-line\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"0\" y2=\"{low}\"/>");
            let _ = write!(
                svg,
                "<text class=\"soft\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
                low + 15.0
            );
        }
        for (row, bar) in bars.iter().enumerate() {
            self.draw(&mut svg, row as f64 * ROW_HEIGHT, bar);
        }
        svg + "</svg>"
    }

    fn draw(&self, svg: &mut String, top: f64, bar: &Bar) {
        let bar_name = &*bar.name;
        let line = top + BAR_HEIGHT - 1.0;
        let _ = write!(svg, "<text x=\"{}\" y=\"{line:.1}\" text-anchor=\"end\">{bar_name}</text>", LEFT - 8.0);
        let mut sum = 0.0;
        for (number_of_part, (part, name)) in bar.parts.iter().zip(self.parts).enumerate() {
            let (from, to) = (x_position(self.scale.position(sum)), x_position(self.scale.position(sum + part)));
            sum += part;
            let look = if self.parts.len() == 1 {
                format!("bar {}", class(bar_name))
            } else {
                format!("part k{}", number_of_part % 8)
            };
            let place =
                format!("x=\"{from:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{BAR_HEIGHT}\"", (to - from).max(0.0));
            let label = format!("{bar_name}: {name} {}{}", number(*part), self.unit);
            let _ = write!(svg, "<rect class=\"{look}\" {place}><title>{}</title></rect>", escaped(&label));
        }
        let at = x_position(self.scale.position(sum)) + 5.0;
        let label = if bar.parts.is_empty() { "-".to_owned() } else { format!("{}{}", number(sum), self.unit) };
        let _ = write!(svg, "<text x=\"{at:.1}\" y=\"{line:.1}\">{}</text>", escaped(&label));
    }

    /// Returns the legend: the parts with their colours.
    pub(super) fn legend(&self) -> String {
        let mut list = "<ul class=\"legend\">".to_owned();
        for (number, name) in self.parts.iter().enumerate() {
            let _ = write!(list, "<li><span class=\"swatch k{}\"></span>{}</li>", number % 8, escaped(name));
        }
        list + "</ul>"
    }
}

fn x_position(place: f64) -> f64 {
    LEFT + place * (WIDTH - LEFT - RIGHT)
}
