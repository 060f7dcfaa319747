//! Section `[outliers]`: when a worker is ejected, for how long, and how many may be ejected.

use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::TimeSpan;

use crate::routing::Percent;

/// When a worker gets no requests because its requests fail. Names are Envoy's where they mean the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct OutlierConfig {
    /// Consecutive failures that eject a worker; 0 disables this rule.
    #[default(5)]
    pub consecutive_failures: u32,
    /// Percentage of failures that ejects a worker; 0 disables this rule.
    #[default(Percent::try_from(50).expect("50 is one"))]
    pub failure_percentage: Percent,
    /// Interval over which the percentage is computed: the current and the previous one count.
    #[default(TimeSpan::seconds(10))]
    pub interval: TimeSpan,
    /// Minimum number of requests for the percentage rule.
    #[default(20)]
    pub request_volume: u32,
    /// Duration of an ejection, times the number of ejections; also how long a trial request is waited for.
    #[default(TimeSpan::seconds(10))]
    pub base_ejection_time: TimeSpan,
    /// Maximum duration of an ejection.
    #[default(TimeSpan::seconds(300))]
    pub max_ejection_time: TimeSpan,
    /// Maximum percentage of the fleet that is ejected at once, but at least one worker unless it is 0; 0 disables
    /// ejection.
    #[default(Percent::try_from(50).expect("50 is one"))]
    pub max_ejection_percent: Percent,
    /// Number of concurrent trial requests after an ejection.
    #[default(1)]
    pub trial_requests: u32,
}

impl OutlierConfig {
    /// Returns the setting that is out of range, and the accepted values.
    pub fn problem(&self) -> Option<(&'static str, &'static str)> {
        let spans = TimeSpan::seconds(1)..=TimeSpan::seconds(3600);
        if !spans.contains(&self.interval) {
            return Some(("outliers.interval", "accepted is 1s to 1h"));
        }
        if !spans.contains(&self.base_ejection_time) {
            return Some(("outliers.base_ejection_time", "accepted is 1s to 1h"));
        }
        if !(self.base_ejection_time..=TimeSpan::seconds(3600)).contains(&self.max_ejection_time) {
            return Some(("outliers.max_ejection_time", "accepted is outliers.base_ejection_time to 1h"));
        }
        if !(1..=1_000_000).contains(&self.request_volume) {
            return Some(("outliers.request_volume", "accepted is 1 to 1000000"));
        }
        let is_bounded = (1..=100).contains(&self.trial_requests);
        (!is_bounded).then_some(("outliers.trial_requests", "accepted is 1 to 100"))
    }
}
