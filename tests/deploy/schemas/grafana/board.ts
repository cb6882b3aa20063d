import type { Dashboard, RowPanel, Panel, FieldConfig as PanelFieldConfig, FieldConfigSource, DataSourceRef, AnnotationQuery, VariableModel } from '@grafana/schema/dist/types/raw/dashboard/x/types.gen';
import type { Options as StatOptions } from '@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen';
import type { Options as TimeSeriesOptions, FieldConfig as TimeSeriesFieldConfig } from '@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen';
import type { Options as HeatmapOptions, FieldConfig as HeatmapFieldConfig } from '@grafana/schema/dist/types/raw/composable/heatmap/panelcfg/x/types.gen';
import type { Options as BarGaugeOptions } from '@grafana/schema/dist/types/raw/composable/bargauge/panelcfg/x/types.gen';
import type { Options as StateTimelineOptions, FieldConfig as StateTimelineFieldConfig } from '@grafana/schema/dist/types/raw/composable/statetimeline/panelcfg/x/types.gen';
import type { Options as TableOptions, FieldConfig as TableFieldConfig } from '@grafana/schema/dist/types/raw/composable/table/panelcfg/x/types.gen';

interface Defaults<C> extends Omit<PanelFieldConfig, 'custom'> { custom?: C }
interface Source<C> extends Omit<FieldConfigSource, 'defaults'> { defaults: Defaults<C> }
interface PanelOf<T extends string, O, C> extends Omit<Panel, 'type' | 'options' | 'fieldConfig' | 'targets'> { targets: PrometheusTarget[]; type: T; options: O; fieldConfig: Source<C> }

export type StatPanel = PanelOf<'stat', StatOptions, never>;
export type TimeSeriesPanel = PanelOf<'timeseries', TimeSeriesOptions, TimeSeriesFieldConfig>;
export type HeatmapPanel = PanelOf<'heatmap', HeatmapOptions, HeatmapFieldConfig>;
export type BarGaugePanel = PanelOf<'bargauge', BarGaugeOptions, never>;
export type StateTimelinePanel = PanelOf<'state-timeline', StateTimelineOptions, StateTimelineFieldConfig>;
export type TablePanel = PanelOf<'table', TableOptions, TableFieldConfig>;
// What the data source's plugin reads; the package leaves these open.
interface PrometheusMark extends AnnotationQuery { expr: string; titleFormat: string; textFormat: string }
interface QueryVariable extends VariableModel { definition?: string }
interface PrometheusTarget {
  refId: string; datasource: DataSourceRef; expr: string; format: 'time_series' | 'heatmap' | 'table';
  instant: boolean; range: boolean; legendFormat: string; editorMode: 'code' | 'builder';
}
export interface Board extends Omit<Dashboard, 'panels' | 'annotations' | 'templating'> {
  annotations: { list: PrometheusMark[] };
  templating: { list: QueryVariable[] };
  panels: Array<RowPanel | StatPanel | TimeSeriesPanel | HeatmapPanel | BarGaugePanel | StateTimelinePanel | TablePanel>;
}
